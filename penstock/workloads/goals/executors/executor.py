"""What an executor does for an environment or an injector, and what a policy sees of its host."""

from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Shares from 0 to 1 of a host, day and week included; `processes`: hundreds of them."""

    cpu: float
    memory: float
    disk: float
    processes: float
    day: float
    weekday: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a goal. took_s: seconds. output, error: at most what the executor keeps."""

    success: bool
    took_s: float
    output: str = ""
    error: str = ""


class Executor(Protocol):
    """Carries goals out, one at a time."""

    @property
    def goals(self) -> tuple[str, ...]:
        """Return the names of the goals."""

    def reset(self, seed: int) -> None:
        """Begin an episode."""

    def read(self) -> Readings:
        """Return what is seen now."""

    def idle(self) -> None:
        """Let a step pass without a goal."""

    def carry_out(self, goal: str) -> Outcome:
        """Carry a goal out and let a step pass; raises KeyError for one that is not among `goals`."""

    def close(self) -> None:
        """Let go of what is held."""


# ---- What a policy sees of a host: its readings, and the outcomes of earlier goals.

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
