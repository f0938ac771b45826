"""What a goal is worth: −0.01 for each step, +1 for success, −0.5 for failure, +0.2 for a fast success."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalReward:
    """Rewards of a step; they add up. fast: of a success within `fast_s`. Doing nothing earns `step`."""

    step: float = -0.01
    success: float = 1.0
    failure: float = -0.5
    fast: float = 0.2
    fast_s: float = 0.5

    def of(self, *, acted: bool, success: bool, took_s: float) -> float:
        """Return the reward of one step. acted: a goal was tried."""
        if not acted:
            return self.step
        if not success:
            return self.step + self.failure
        return self.step + self.success + (self.fast if took_s < self.fast_s else 0.0)

    def table(self, success: NDArray[np.float64], took_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the expected rewards, [A, S], where action 0 does nothing.

        success: probabilities, took_s: seconds, both [A, S].
        """
        well = self.success + self.fast * (took_s < self.fast_s)
        rewards = self.step + success * well + (1 - success) * self.failure
        rewards[0] = self.step
        return rewards
