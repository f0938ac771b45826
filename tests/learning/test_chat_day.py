"""People who talk over HTTP and rate each answer are answered better and better, while they talk.

Everything is real but the people: `penstock gateway chat`, its server of text over gRPC, Redis, a learner. A
conversation has three turns and is one column of tokens.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.support.chat.chat_day import Day, play
from tests.support.chat.chat_people import TURNS, Plan
from tests.support.chat.satisfaction import optimum

PARTS: Final = 10
BETA: Final = 0.1
SHORT: Final = 400
LONG: Final = 3000


def check(day: Day, conversations: int) -> None:
    """Whole books; a beginning as the base has it, and an end that is no better than anything can be."""
    assert len(day.liked) == TURNS * conversations
    assert day.summary["ledger"]["balanced"]
    assert abs(day.chances(2 * PARTS)[0] - optimum(1e6)[0]) <= 0.1
    assert day.chances(PARTS)[-1] <= optimum(BETA)[0] + 0.03


@pytest.mark.slow
def test_satisfaction_rises_within_four_hundred_conversations(tmp_path: Path) -> None:
    day = play(tmp_path, Plan(conversations=SHORT, at_once=8, seed=0))
    thirds = day.chances(3)
    print([round(one, 3) for one in thirds])
    check(day, SHORT)
    assert thirds[2] - thirds[0] >= 0.08


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_people_are_satisfied_in_the_end(tmp_path: Path, seed: int) -> None:
    day = play(tmp_path, Plan(conversations=LONG, at_once=8, seed=seed))
    print(f"seed {seed}: {[round(one, 3) for one in day.chances(PARTS)]}, {day.summary['updates']} updates")
    check(day, LONG)
    assert day.chances(PARTS)[-1] >= 0.9 * optimum(BETA)[0]
