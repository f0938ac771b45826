"""The bounds of a canary and the outcome of an episode, by which `safety` compares the two arms.

How many episodes of the canary it takes until 95% of drops in return are proved, by the size of the drop in
deviations of one episode's return, over an `observed_range`, one active episode for each (simulated):

    drop ÷ deviation   0.4   0.5   0.6   0.8   1.0   1.5   2.0
    episodes           272   202   156    99    76    45    33

So the horizon of 200 fits a drop of half a deviation; for a smaller one set a longer horizon, or compare with
several active episodes. A range much wider than the returns that occur costs episodes: observe it if you can.
"""

import math
from dataclasses import dataclass
from typing import Final

from penstock.registry.records import Evaluation

MAX_WAITING: Final = 64
"""Most episodes of an arm that wait for one of the other; the oldest gives way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds within which a canary must stay."""

    low: float
    high: float
    """Range of an episode's return, declared or observed before the test began (`observed_range`)."""
    horizon: int = 200
    """Episodes of the canary within which there is a verdict."""
    false_alarm: float = 0.05
    """Chance that a canary that equals the active version is withdrawn or promoted."""
    return_margin: float = 0.0
    """Drop in return that is tolerated, in units of return."""
    error_margin: float = 0.0
    slow_margin: float = 0.0
    """Rise in slow answers that is tolerated, as a share of an episode's answers."""
    max_not_finite: int = 0
    """Answers of the canary that may be not finite."""
    active_per_canary: int = 1
    """Episodes of the active version that each one of the canary is compared with.

    At a share of 0.1 up to 9.
    """

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low={self.low}, high={self.high}: both finite, low below high")
        if not 0.0 < self.false_alarm < 1.0:
            raise ValueError(f"false_alarm={self.false_alarm}: must lie between 0 and 1")
        for name, most in (
            ("return_margin", self.high - self.low),
            ("error_margin", 1.0),
            ("slow_margin", 1.0),
        ):
            if not 0.0 <= getattr(self, name) < most:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or more and below {most:g}")
        if self.horizon < 1 or self.max_not_finite < 0:
            raise ValueError(f"horizon={self.horizon}, max_not_finite={self.max_not_finite}: 1 and 0 or more")
        if not 1 <= self.active_per_canary <= MAX_WAITING:
            raise ValueError(
                f"active_per_canary={self.active_per_canary}: must be between 1 and {MAX_WAITING}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one episode, or of one request of a client without episodes."""

    total_return: float | None
    """Undiscounted; None where no reward was reported."""
    answers: int
    errors: int = 0
    """Answers that failed or came from the fallback."""
    slow: int = 0
    """Answers over the latency bound."""
    not_finite: int = 0
    """Answers whose action, log-probability or value was not finite."""

    def __post_init__(self) -> None:
        if self.total_return is not None and not math.isfinite(self.total_return):
            raise ValueError(
                f"total_return={self.total_return}: must be finite; refuse the reward that was not"
            )
        for name in ("errors", "slow", "not_finite"):
            if not 0 <= getattr(self, name) <= self.answers:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be between 0 and answers={self.answers}"
                )


def observed_range(evaluation: Evaluation) -> tuple[float, float]:
    """Return (low, high) of a return from the active version's evaluation.

    Four deviations, at least a fifth of the mean.

    The evaluation must be known before the test begins: a range that follows the episodes it bounds would
    invalidate the test.
    """
    reach = max(4.0 * evaluation.std, 0.2 * abs(evaluation.mean), 1e-6)
    return evaluation.mean - reach, evaluation.mean + reach
