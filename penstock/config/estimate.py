"""What is expected of a figure before it is known.

An estimate has a low, a likely and a high value, from measured spread and a stated margin.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

MARGIN: Final = 0.1
"""Share by which low and high lie beyond the lowest and the highest measured value.

A calibration sees a few seconds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """low ≤ likely ≤ high, in the unit of the field that holds it."""

    low: float
    likely: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Self:
        """Return an estimate of a known value."""
        return cls(low=value, likely=value, high=value)

    @classmethod
    def of(cls, samples: Sequence[float], likely: float | None = None) -> Self:
        """Return the range of measurements of one figure, at least one; likely: else their mean."""
        middle = statistics.fmean(samples) if likely is None else likely
        low, high = min(*samples, middle), max(*samples, middle)
        return cls(low=low * (1 - MARGIN), likely=middle, high=high * (1 + MARGIN))

    def __add__(self, other: "Range") -> "Range":
        return Range(low=self.low + other.low, likely=self.likely + other.likely, high=self.high + other.high)

    def times(self, factor: float) -> "Range":
        """Return `factor` of them, not negative."""
        return Range(low=self.low * factor, likely=self.likely * factor, high=self.high * factor)

    def at_most(self, bound: "Range") -> "Range":
        """Return each end bounded by that of `bound`."""
        return Range(
            low=min(self.low, bound.low),
            likely=min(self.likely, bound.likely),
            high=min(self.high, bound.high),
        )

    def to_json(self) -> dict[str, float]:
        """Return a JSON object; three decimals are more than is known."""
        return {
            "low": round(self.low, 3),
            "likely": round(self.likely, 3),
            "high": round(self.high, 3),
        }


def total(ranges: Iterable[Range]) -> Range:
    """Return the sum of ranges, as if all came out low, or all high."""
    return sum(ranges, start=Range.exactly(0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Statistics of scores or returns. mean, std: None without any."""

    count: int
    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the figures of these scores; std is that of the population."""
        if not values:
            return cls(count=0, mean=None, std=None)
        return cls(count=len(values), mean=statistics.fmean(values), std=statistics.pstdev(values))
