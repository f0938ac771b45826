"""What a policy sees of a host: its readings, and what became of the goals before.

cpu, memory, disk, processes │ success rate, seconds and errors of the last 10 goals │ steps since the last
goal │ day, weekday │ which goal was last, one-hot; zeros before the first
"""

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.goals.executors.executor import Outcome, Readings

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
        """Return the length of an observation."""
        return NUMBERS + len(self._goals)

    def clear(self) -> None:
        """Begin anew."""
        self._recent: deque[Outcome] = deque(maxlen=_RECENT)
        self._since, self._last = 0, ""

    def idle(self) -> None:
        """Note that a step without a goal has passed."""
        self._since += 1

    def note(self, goal: str, outcome: Outcome) -> None:
        """Note that a goal has been carried out."""
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
