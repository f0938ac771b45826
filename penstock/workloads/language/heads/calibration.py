"""What makes a head's number the share of people who say yes: σ(slope · z + shift), after Platt (1999).

Slope and shift have the least cross-entropy on ratings that the network was not trained on. It is convex in
both, so Newton's method finds the least; ratings between no and yes count as so much of each.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST: Final = 30
"""Fewest ratings by which a head is calibrated; below, its numbers stay as they are."""
_STEPS: Final = 50
_RIDGE: Final = 1e-3
"""Pulls slope to 1 and shift to 0, by as much as a thousandth of a rating would: a finite optimum always."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A line under a sigmoid."""

    slope: float = 1.0
    shift: float = 0.0

    def share(self, logits: Array) -> Array:
        """Return the shares, 0 to 1, of a head's numbers."""
        value: Array = 1 / (1 + np.exp(-np.clip(self.slope * logits + self.shift, -60, 60)))
        return value


def calibrate(logits: Array, said: Array) -> Calibration:
    """Return the calibration of a head by its numbers and what was said, [S] each, NaN where unrated.

    That of no change where fewer than LEAST were rated, or where it would turn the order around.
    """
    given = ~np.isnan(said)
    if given.sum() < LEAST:
        return Calibration()
    x = np.stack([logits[given], np.ones(int(given.sum()))], 1)
    weights = np.array([1.0, 0.0])
    for _ in range(_STEPS):
        shares = 1 / (1 + np.exp(-np.clip(x @ weights, -60, 60)))
        gradient = x.T @ (shares - said[given]) + _RIDGE * (weights - [1.0, 0.0])
        curvature = (x * (shares * (1 - shares))[:, None]).T @ x + _RIDGE * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        weights -= step * min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
    return Calibration(float(weights[0]), float(weights[1])) if weights[0] > 0 else Calibration()
