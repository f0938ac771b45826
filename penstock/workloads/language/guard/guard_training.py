"""Trains the classifier of a guard, and measures it on texts that it was not trained on."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.workloads.language.guard.guard_rows import GuardRow
from penstock.workloads.language.guard.text_classifier import TextClassifier, train_classifier

FOLDS: Final = 5
_Z: Final = 1.959964
"""Of an interval that holds the true share in 95 of 100 cases."""


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many, with the interval of 95 % (Wilson 1927)."""

    count: int
    of: int

    def interval(self) -> tuple[float, float]:
        """Return the least and the greatest that the true share may be; 0 and 1 of none."""
        if not self.of:
            return 0.0, 1.0
        share, spread = self.count / self.of, _Z**2 / self.of
        middle = (share + spread / 2) / (1 + spread)
        half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class Trained:
    """A classifier of all rows, and what classifiers of the other folds say of each fold.

    recall: of the texts that should be blocked, how many were. false_alarms: of the others, how many were.
    """

    classifier: TextClassifier
    recall: Share
    false_alarms: Share


def train_guard(rows: Sequence[GuardRow], *, threshold: float = 0.5) -> Trained:
    """Return the classifier with its measures; raises ValueError where one side has fewer than FOLDS texts.

    A text's fold is decided by the text alone; equal texts are in one fold.
    """
    for blocked in (False, True):
        count = len({row.text for row in rows if row.blocked == blocked})
        if count < FOLDS:
            kind = "blocked" if blocked else "passed"
            raise ValueError(f"{count} texts that should be {kind}: give at least {FOLDS}")
    found = {True: 0, False: 0}
    for fold in range(FOLDS):
        held = [row for row in rows if _fold(row.text) == fold]
        rest = [row for row in rows if _fold(row.text) != fold]
        other = _train(rest, threshold)
        for row in held:
            found[row.blocked] += other.chance(row.text) >= threshold
    sides = {side: sum(row.blocked == side for row in rows) for side in (True, False)}
    return Trained(
        _train(rows, threshold), Share(found[True], sides[True]), Share(found[False], sides[False])
    )


def _train(rows: Sequence[GuardRow], threshold: float) -> TextClassifier:
    return train_classifier([row.text for row in rows], [row.blocked for row in rows], threshold=threshold)


def _fold(text: str) -> int:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] % FOLDS
