"""The executor `simulated`: the host of `penstock.workloads.goals.host`, deterministic given its seed."""

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.goals.executors.executor import Outcome, Readings
from penstock.workloads.goals.host import ACTIONS, GOALS, HEALTHY, STATES, HostState, host_model

_STEP_S: Final = 30
"""A step is so many seconds of the host's day, which begins on a Monday at midnight."""


class SimulatedHost:
    """A host in one of 72 states; begins healthy."""

    goals = GOALS

    def __init__(self) -> None:
        model = host_model()
        self._model = model
        self._arrivals = model.arrivals.cumsum(1)
        self._random = np.random.default_rng(0)
        self._state, self._steps = STATES.index(HEALTHY), 0

    @property
    def state(self) -> HostState:
        return STATES[self._state]

    def reset(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._state, self._steps = STATES.index(HEALTHY), 0

    def read(self) -> Readings:
        state = self.state
        return Readings(
            cpu=0.1 + 0.4 * state.load,
            memory=0.2 + 0.35 * state.cache,
            disk=0.1 + 0.28 * state.log,
            processes=1.0 - 0.5 * state.down,
            day=self._steps * _STEP_S / 86_400 % 1,
            weekday=0.0,
        )

    def idle(self) -> None:
        self._steps += 1
        drawn = np.searchsorted(self._arrivals[self._state], self._random.random(), side="right")
        self._state = min(int(drawn), len(STATES) - 1)

    def carry_out(self, goal: str) -> Outcome:
        action = ACTIONS.index(goal)
        success = bool(self._random.random() < self._model.success[action, self._state])
        took_s = float(self._model.took_s[action, self._state])
        if success:
            self._state = int(self._model.mended[action, self._state])
        self.idle()
        return Outcome(success=success, took_s=took_s, error="" if success else "there was nothing to mend")

    def close(self) -> None:
        """Do nothing: nothing is held."""


# ---- What a policy sees of a host: its readings, and what became of the goals before.

NUMBERS: Final = 10
_RECENT: Final = 10
_LONG_STEPS: Final = 50


class History:
    """The outcomes of an episode's goals, as numbers."""

    def __init__(self, goals: tuple[str, ...]) -> None:
        self._goals = goals
        self.clear()

    @property
    def width(self) -> int:
        return NUMBERS + len(self._goals)

    def clear(self) -> None:
        self._recent: deque[Outcome] = deque(maxlen=_RECENT)
        self._since, self._last = 0, ""

    def idle(self) -> None:
        self._since += 1

    def note(self, goal: str, outcome: Outcome) -> None:
        self._recent.append(outcome)
        self._since, self._last = 0, goal

    def observation(self, readings: Readings) -> NDArray[np.float32]:
        """Return what is seen, float32 [width], each number from 0 to about 1."""
        count = len(self._recent) or 1
        numbers = [
            readings.cpu,
            readings.memory,
            readings.disk,
            readings.processes,
            sum(one.success for one in self._recent) / count,
            min(sum(one.took_s for one in self._recent) / count / 5, 1.0),
            sum(bool(one.error) for one in self._recent) / count,
            min(self._since / _LONG_STEPS, 1.0),
            readings.day,
            readings.weekday,
        ]
        return np.array([*numbers, *(float(goal == self._last) for goal in self._goals)], np.float32)
