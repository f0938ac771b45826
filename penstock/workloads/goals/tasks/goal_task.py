"""`Goals-v0`: choose a host's next goal, or none."""

from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.host import GoalReward, History, SimulatedHost
from penstock.workloads.goals.live_host import Commands, Executor, read_commands

_EXECUTORS: Final = ("simulated", "commands")


class GoalTask(gymnasium.Env[NDArray[np.float32], np.int64]):
    """A step is a goal, or action 0: nothing. Episodes are cut after 50 steps.

    Observation: that of `History` of `penstock.workloads.goals.host`. Rewards: those of `GoalReward`.

    Args:
        executor: `simulated`, or `commands`, which starts programs of this machine.
        goals: file of the commands, for `commands` only.
        actors_act: whether `commands` are started; false: with them, reset and step raise
            ConfigurationError.
        rewards: other rewards, by the names of `GoalReward`.

    Raises:
        ConfigurationError: an argument that does not fit; it names the argument.
    """

    def __init__(
        self,
        executor: str = "simulated",
        goals: str = "",
        rewards: dict[str, float] | None = None,
        *,
        actors_act: bool = False,
    ) -> None:
        self.executor = _executor(executor, goals, acts=actors_act)
        try:
            self._reward = GoalReward(**(rewards or {}))
        except TypeError as error:
            raise ConfigurationError(f"environment.kwargs.rewards={rewards}: {error}") from error
        self._history = History(self.executor.goals)
        self.observation_space = spaces.Box(-1e6, 1e6, (self._history.width,), np.float32)
        self.action_space = spaces.Discrete(len(self.executor.goals) + 1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.executor.reset(int(self.np_random.integers(2**31)))
        self._history.clear()
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """action: 0 nothing, i the i-th goal. `info` has the goal, if any, and its outcome."""
        if not action:
            self.executor.idle()
            self._history.idle()
            return self._observe(), self._reward.of(None), False, False, {}
        goal = self.executor.goals[int(action) - 1]
        outcome = self.executor.carry_out(goal)
        self._history.note(goal, outcome)
        return self._observe(), self._reward.of(outcome), False, False, {"goal": goal, "outcome": outcome}

    def _observe(self) -> NDArray[np.float32]:
        return self._history.observation(self.executor.read())


def _executor(executor: str, goals: str, *, acts: bool) -> Executor:
    if not isinstance(acts, bool):
        raise ConfigurationError(f"environment.kwargs.actors_act={acts!r}: must be true or false")
    if executor not in _EXECUTORS:
        raise ConfigurationError(
            f"environment.kwargs.executor={executor!r}: must be one of {', '.join(_EXECUTORS)}"
        )
    if executor == "simulated":
        if goals:
            raise ConfigurationError(
                f"environment.kwargs.goals={goals!r}: is for environment.kwargs.executor='commands'; "
                "set that too, or leave the file out"
            )
        return SimulatedHost()
    if not goals:
        raise ConfigurationError("environment.kwargs.goals: is missing; name the file of the commands")
    return Commands(read_commands(Path(goals)), acts=acts)
