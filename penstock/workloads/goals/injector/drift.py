"""Whether goals succeed less often than they did: the newest outcomes against those before."""

import math
from collections.abc import Sequence
from typing import Final

NEWEST: Final = 30
BEFORE: Final = 200
FEWEST_BEFORE: Final = 50
CHANCE: Final = 1e-6
"""How often so bad a streak would come by chance, were outcomes independent of one another.

They are not, since a host that is healthy gives little to mend for a while, and it is looked for at every
outcome: in twelve days of a policy that got better the worst streak came to 7e-5.
"""


def drifted(successes: Sequence[bool], versions: Sequence[int]) -> str:
    """Return what is wrong, "" where nothing is.

    successes, versions: of the injected goals, oldest first. The newest outcomes are those of the newest
    version, at most 30; where it has fewer than 15, the last 30 of all. Up to 200 before them count.
    """
    own = _length_of_last(versions)
    count = min(own, NEWEST) if own >= NEWEST // 2 else NEWEST
    new, old = successes[-count:], successes[: -count or None][-BEFORE:]
    if len(old) < FEWEST_BEFORE or len(new) < count:
        return ""
    # Drawn a little towards one half, so that a rate of 1 or 0 is never certain.
    rate = (sum(old) + 1) / (len(old) + 2)
    if _at_most(sum(new), len(new), rate) >= CHANCE:
        return ""
    return (
        f"of the last {len(new)} injected goals {sum(new)} succeeded, of the {len(old)} before "
        f"{sum(old)}: version {versions[-1]} or the system has changed"
    )


def _at_most(successes: int, of: int, rate: float) -> float:
    """Return the probability of so many successes or fewer, by the binomial distribution."""
    return sum(math.comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(successes + 1))


def _length_of_last(versions: Sequence[int]) -> int:
    length = 0
    for version in reversed(versions):
        if version != versions[-1]:
            break
        length += 1
    return length
