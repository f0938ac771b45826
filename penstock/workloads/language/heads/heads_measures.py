"""How good a network of several heads is on what it was not trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BINS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMeasures:
    """Of one head; None where nothing was there to measure it on.

    ratings: how many. squared_error: mean, on the scale 0 to 1. auc: of telling ratings above a half from
    those below. calibration_error: mean distance of what was said from what was predicted, over BINS bins of
    equal width, weighted by their ratings (Guo et al. 2017).
    """

    ratings: int = 0
    squared_error: float | None = None
    auc: float | None = None
    calibration_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsMeasures:
    """Of all heads. pair_accuracy: share of the pairs in the right order; equal scores count half."""

    heads: Mapping[str, HeadMeasures]
    pairs: int = 0
    pair_accuracy: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the measures by name, as JSON holds them."""
        return {
            "heads": {name: asdict(one) for name, one in self.heads.items()},
            "pairs": self.pairs,
            "pair_accuracy": self.pair_accuracy,
        }


def measure_heads(
    names: Sequence[str], shares: Array, targets: Array, margins: Array | None = None
) -> HeadsMeasures:
    """Return the measures of predictions.

    names: of K heads. shares: predicted, 0 to 1, [S, K]. targets: said, NaN where unrated, [S, K].
    margins: of each pair, better minus worse, [P].
    """
    found = {name: measure_head(shares[:, k], targets[:, k]) for k, name in enumerate(names)}
    apart = np.zeros(0) if margins is None else margins
    accuracy = float(np.mean((np.sign(apart) + 1) / 2)) if len(apart) else None
    return HeadsMeasures(heads=found, pairs=len(apart), pair_accuracy=accuracy)


def measure_head(shares: Array, targets: Array) -> HeadMeasures:
    """Return the measures of one head; shares, targets: [S], NaN where unrated."""
    given = ~np.isnan(targets)
    predicted, said = shares[given], targets[given]
    if not len(said):
        return HeadMeasures()
    return HeadMeasures(
        ratings=len(said),
        squared_error=float(np.mean((predicted - said) ** 2)),
        auc=area_under_curve(predicted[said > 0.5], predicted[said < 0.5]),
        calibration_error=_calibration_error(predicted, said),
    )


def area_under_curve(above: Array, below: Array) -> float | None:
    """Return how often a score of the first is higher than one of the second; equal ones count half.

    None where one of them is empty.
    """
    if not len(above) or not len(below):
        return None
    ordered = np.sort(below)
    lower = np.searchsorted(ordered, above, "left") + np.searchsorted(ordered, above, "right")
    return float(lower.mean() / 2 / len(below))


def _calibration_error(predicted: Array, said: Array) -> float:
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    total = 0.0
    for one in range(BINS):
        inside = bins == one
        if inside.any():
            total += float(inside.mean() * abs(predicted[inside].mean() - said[inside].mean()))
    return total
