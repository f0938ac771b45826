"""The best that can be earned on the simulated host, by value iteration over its tables."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.goals.host import HEALTHY, STATES, GoalReward, host_model


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """value: mean return of an episode that begins healthy. policy: int64 [steps, S], the best actions."""

    value: float
    policy: NDArray[np.int64]


def optimum(steps: int, reward: GoalReward) -> Optimum:
    """Return the optimum of episodes of so many steps, without discounting, backwards from their end."""
    model = host_model()
    succeeds = model.success
    expected = _rewards(reward, succeeds, model.took_s)
    value = np.zeros(len(STATES))
    policy = np.zeros((steps, len(STATES)), np.int64)
    for step in reversed(range(steps)):
        arrived = model.arrivals @ value
        after = succeeds * arrived[model.mended] + (1 - succeeds) * arrived
        best = expected + after
        policy[step] = best.argmax(0)
        value = best.max(0)
    return Optimum(float(value[STATES.index(HEALTHY)]), policy)


def _rewards(
    reward: GoalReward, success: NDArray[np.float64], took_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Expected rewards [A, S]. success: probabilities, took_s: seconds, both [A, S]."""
    well = reward.success + reward.fast * (took_s < reward.fast_s)
    rewards = reward.step + success * well + (1 - success) * reward.failure
    rewards[0] = reward.step
    return rewards
