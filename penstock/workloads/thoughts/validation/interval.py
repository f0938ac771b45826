"""Means and correlations with bootstrap intervals; pure functions."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 1000
_SEED: Final = 0
_STILL: Final = 1e-3
"""A deviation below it is none, in shares and in nats."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean or a correlation with its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def interval(values: NDArray[Any], of: NDArray[Any] | None = None) -> Interval:
    """Return the mean of values [N] with an interval over resampled examples; equal for equal values.

    of: [N], number of the example of each value, from 0; None: each is of an example of its own. Values of
    one example are resampled together, since they are no independent draws.
    """
    numbers = np.asarray(values, np.float64)
    owner = np.arange(len(numbers)) if of is None else of
    counts = np.bincount(owner)
    sums, counts = np.bincount(owner, numbers)[counts > 0], counts[counts > 0]
    drawn = _resamples(len(counts))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return Interval(float(numbers.mean()), float(low), float(high))


def correlation(one: NDArray[Any], other: NDArray[Any]) -> Interval | None:
    """Return Pearson's correlation of two rows [N], with an interval over resampled pairs.

    None where one of them does not vary. Resamples in which one does not vary say nothing, and are left out.
    """
    if min(np.std(one), np.std(other)) < _STILL:
        return None
    drawn = _resamples(len(one))
    left, right = (
        row[drawn] - row[drawn].mean(1, keepdims=True)
        for row in (np.asarray(one, np.float64), np.asarray(other, np.float64))
    )
    spread = np.sqrt((left**2).sum(1) * (right**2).sum(1))
    varies = spread > 0.0
    low, high = np.quantile((left * right).sum(1)[varies] / spread[varies], (0.025, 0.975))
    return Interval(float(np.corrcoef(one, other)[0, 1]), float(low), float(high))


def _resamples(count: int) -> NDArray[np.int64]:
    """Return places of examples, drawn with replacement, [RESAMPLES, count]."""
    return np.random.default_rng(_SEED).integers(count, size=(RESAMPLES, count))
