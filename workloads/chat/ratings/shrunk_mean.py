"""What a response is worth by the few who rated it: their mean, pulled to that of all."""

from collections.abc import Sequence
from typing import Final

STRENGTH: Final = 50.0
"""So many ratings of the mean of all are added: one person moves a response by less than 1/50."""


def shrunk_mean(shares: Sequence[float], everywhere: float, strength: float = STRENGTH) -> float:
    """Return the mean of the ratings of a response, 0 to 1 each, one of a person.

    everywhere: the mean over all responses. strength: how many ratings of it are added, at least 0; with 0 a
    response without ratings has the value `everywhere`.
    """
    if strength < 0:
        raise ValueError(f"strength={strength}: must be at least 0")
    weight = len(shares) + strength
    return (sum(shares) + strength * everywhere) / weight if weight else everywhere
