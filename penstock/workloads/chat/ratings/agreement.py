"""Who says the opposite of what others say: a test that may be looked at after every thumb.

With p the chance of a thumb up that others give a response, somebody honest has the thumb up with chance p, a
liar with chance 1 − p. The evidence for a liar is

    e = Π (1 − p)^t p^(1 − t) / (p^t (1 − p)^(1 − t)),     log e = − Σ (2t − 1) · log(p / (1 − p))

Where the p are right, e of an honest person has the mean 1 however long it goes on, so the chance that it
ever passes 1/α is at most α (Ville 1939). With n people α is divided by n. Where the p are guesses of few
others it is a good rule without that promise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.workloads.chat.ratings.rating_rules import RatingRules

SURE: Final = 0.1
"""What others say is never surer than this from 0 or 1: a single thumb is weak evidence."""

Row = Mapping[str, Any]
Expected = Callable[[Row], float | None]
"""What others say of the response of a row: the chance of a thumb up, None where that is not known."""


def liars(thumbs: Sequence[tuple[str, bool, float]], rules: RatingRules) -> dict[str, float]:
    """Return the people whose evidence passes the bound, with its logarithm.

    thumbs: who said it, whether it is up, and the chance of a thumb up by others, 0 to 1.
    """
    evidence: dict[str, float] = {}
    worst: dict[str, float] = {}
    count: dict[str, int] = {}
    for rater, is_up, chance in thumbs:
        sure = min(max(chance, SURE), 1 - SURE)
        odds = math.log(sure / (1 - sure))
        evidence[rater] = evidence.get(rater, 0.0) + (-odds if is_up else odds)
        count[rater] = count.get(rater, 0) + 1
        if count[rater] >= rules.least:
            worst[rater] = max(worst.get(rater, -math.inf), evidence[rater])
    bound = math.log(max(len(count), 1) / rules.false_alarms)
    return {rater: found for rater, found in worst.items() if found > bound}


def others_share(rows: Sequence[tuple[str, str, bool]], strength: float = 2.0) -> Callable[[str, str], float]:
    """Return what others than somebody say of a response, from their thumbs.

    rows: who said it, of which response, whether it is up. strength: so many thumbs of the mean of all are
    added, so that without other ratings the answer is that mean.
    """
    ups: dict[str, float] = {}
    counts: dict[str, int] = {}
    own: dict[tuple[str, str], tuple[float, int]] = {}
    for rater, response, is_up in rows:
        ups[response] = ups.get(response, 0.0) + is_up
        counts[response] = counts.get(response, 0) + 1
        up, count = own.get((rater, response), (0.0, 0))
        own[rater, response] = up + is_up, count + 1
    mean = sum(ups.values()) / max(sum(counts.values()), 1)

    def share(rater: str, response: str) -> float:
        up, count = own.get((rater, response), (0.0, 0))
        others = counts.get(response, 0) - count
        return (ups.get(response, 0.0) - up + strength * mean) / (others + strength)

    return share
