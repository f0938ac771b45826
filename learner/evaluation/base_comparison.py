"""An evaluated version beside the base, the policy that training began with, on the same episodes.

Both are played from the same seeds, so that an episode of one has its pair in the other: the same start and
the same random numbers. d are the differences of the returns in n pairs. Episodes with one start, such as a
prompt that is asked several times, are no independent draws, so that the standard error of the mean of d is
that of sums by start (Liang and Zeger 1986), of which there are G:

    SE² = G / (G − 1) · Σ_g (Σ_{i in g} (d_i − mean d))² / n²,      interval: mean d ± t(0.975, G − 1) · SE

With one episode a start that is the deviation of d by √n.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from penstock.config.settings import ConfigurationError, EvaluationSection
from penstock.config.workload import Workload
from penstock.protocol.messages import Episode

LEAST_STARTS: Final = 6
"""Fewer say nothing at 95%, even where all of them agree: 2 · 0.5⁵ = 0.06."""
BETTER: Final = "better"
WORSE: Final = "worse"
CHANCE: Final = "chance"

Key = tuple[int, int]
"""Start of an episode, and its number among those with that start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """A version's episodes beside the base's, of which there are as many.

    mean, std, length: of the base: undiscounted returns, their deviation over episodes, steps.
    version_length: mean steps of the version's episodes. difference: mean return of the version less the
    base's. standard_error: of it; low, high: its 95% interval; None with fewer than LEAST_STARTS starts.
    """

    mean: float
    std: float
    episodes: int
    starts: int
    length: float
    version_length: float
    difference: float
    standard_error: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """Return what the interval says: BETTER or WORSE than the base, or not to be told from CHANCE."""
        if self.low is not None and self.low > 0.0:
            return BETTER
        return WORSE if self.high is not None and self.high < 0.0 else CHANCE

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "BaseComparison":
        """Return what `to_json` was taken from."""
        return cls(**{name: found for name, found in value.items() if name != "verdict"})


def check_base(section: EvaluationSection, workload: Workload) -> None:
    """Raise ConfigurationError where an evaluation actor cannot play what training begins with."""
    if section.base and workload.acting:
        raise ConfigurationError(
            f"evaluation.base=true: policies of workload {workload.name!r} act once they have weights; leave "
            "it out"
        )


def compare(version: Mapping[Key, Episode], base: Mapping[Key, Episode]) -> BaseComparison | None:
    """Return how the episodes of a version compare with the base's; None where none is a pair."""
    pairs = [(version[key], base[key]) for key in sorted(version.keys() & base.keys())]
    if not pairs:
        return None
    returns = [other.episode_return for _, other in pairs]
    differences = [(own.slot_id, own.episode_return - other.episode_return) for own, other in pairs]
    mean = statistics.fmean(difference for _, difference in differences)
    starts, error = _standard_error(differences, mean)
    margin = None if error is None else _quantile(starts - 1) * error
    return BaseComparison(
        mean=statistics.fmean(returns),
        std=statistics.pstdev(returns),
        episodes=len(pairs),
        starts=starts,
        length=statistics.fmean(other.length for _, other in pairs),
        version_length=statistics.fmean(own.length for own, _ in pairs),
        difference=mean,
        standard_error=error,
        low=None if margin is None else mean - margin,
        high=None if margin is None else mean + margin,
    )


def _standard_error(differences: list[tuple[int, float]], mean: float) -> tuple[int, float | None]:
    """Return the number of starts and the standard error; differences: start and difference of each pair."""
    sums: dict[int, float] = {}
    for start, difference in differences:
        sums[start] = sums.get(start, 0.0) + difference - mean
    count = len(sums)
    if count < LEAST_STARTS:
        return count, None
    variance = count / (count - 1) * math.fsum(one * one for one in sums.values())
    return count, math.sqrt(variance) / len(differences)


def _quantile(degrees: int) -> float:
    """Return t(0.975) of five degrees of freedom or more, to 0.2% (Abramowitz and Stegun 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
