"""What those who give stars think of each side of a version's answers: relevance, helpfulness, safety.

Of the conversations in which somebody rated a side, the share whose newest stars were four or five. Nobody is
counted who gave none: few people give stars, so this compares versions and tells nothing of all people.
"""

from typing import Any, Final, get_args

from gateway.surface import satisfaction
from penstock.registry.registry import Registry
from workloads.chat.http.chat_bodies import Key
from workloads.chat.http.kept_ratings import ASKED_SOURCE

SIDES: Final[tuple[str, ...]] = get_args(Key)
GOOD: Final = 3.5
"""Stars above it are good ones."""


def rated_sides(registry: Registry, policy: str) -> list[dict[str, Any]]:
    """Return a row for each version and side that somebody rated, newest version first.

    `share`, `low` and `high` are null below the fewest conversations by which a version is judged. Answers
    that somebody was asked about are left out. Raises RegistryError.
    """
    rows = [row for side in SIDES for row in _of_side(registry, policy, side)]
    return sorted(rows, key=lambda row: -row["version"])


def _of_side(registry: Registry, policy: str, side: str) -> list[dict[str, Any]]:
    tallies = registry.tally(policy, side, above=GOOD, without=ASKED_SOURCE)
    found = satisfaction({one.version: one.rated for one in tallies}, tallies)
    return [
        {
            "version": one.version,
            "side": side,
            "rated": one.rated,
            "good": one.thumbs_up,
            "share": one.share,
            "low": one.low,
            "high": one.high,
        }
        for one in found
    ]
