"""Means with bootstrap intervals, and a correlation that says when it cannot tell; pure functions."""

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
    """A mean with its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


def interval(values: NDArray[Any]) -> Interval:
    """Return the mean of values [N] with an interval over resampled examples; equal for equal values."""
    numbers = np.asarray(values, np.float64)
    random = np.random.default_rng(_SEED)
    means = numbers[random.integers(len(numbers), size=(RESAMPLES, len(numbers)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(numbers.mean()), float(low), float(high))


def correlation(one: NDArray[Any], other: NDArray[Any]) -> float | None:
    """Return Pearson's correlation of two rows of numbers [N]; None where one of them does not vary."""
    if min(np.std(one), np.std(other)) < _STILL:
        return None
    return float(np.corrcoef(one, other)[0, 1])
