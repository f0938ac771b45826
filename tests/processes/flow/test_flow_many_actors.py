"""Two hundred actors at one broker.

All connect at once, none is refused, and nothing acknowledged is lost.
"""

import pytest

from benchmarks.actors import measure
from benchmarks.stand import services
from penstock.protocol.limits import MIB

MOST_MEMORY = 512 * MIB


@pytest.mark.parametrize(
    ("rate", "seconds"), [(0.5, 6), pytest.param(5, 60, marks=pytest.mark.slow)], ids=["low", "full"]
)
def test_two_hundred_actors_at_one_broker(rate: float, seconds: float) -> None:
    with services(durability="fsync_1s") as here:
        outcome = measure(here, actors=200, rate=rate, seconds=seconds)
    assert outcome.acked > 200, "the actors sent next to nothing"
    assert outcome.lost == 0
    assert outcome.broker_memory < MOST_MEMORY
