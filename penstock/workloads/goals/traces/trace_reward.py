"""What an outcome is worth, with weights that a user may change."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.traces.trace_line import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWeights:
    """Rewards of a decision; they add up.

    fast: where it took less than `fast_ms` and had success.
    """

    success: float = 1.0
    failure: float = -0.5
    crash: float = -1.0
    step: float = -0.01
    fast: float = 0.2
    fast_ms: float = 100.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "RewardWeights":
        """Return weights from settings; raises ConfigurationError that names the key."""
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigurationError(f"reward.{name}: unknown; known: {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
                raise ConfigurationError(f"reward.{name}={value!r}: must be a number up to 1e6")
        return cls(**{name: float(value) for name, value in given.items()})

    def reward(self, result: Result) -> float:
        """Return the reward of a decision with that result."""
        took = result.execution_time_ms
        fast = result.success and took is not None and took < self.fast_ms
        return (
            self.step
            + (self.success if result.success else self.failure)
            + (self.crash if result.crashed else 0.0)
            + (self.fast if fast else 0.0)
        )
