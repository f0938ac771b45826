"""What an executor does for an environment or an injector."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What is seen of a host: shares from 0 to 1, `processes` a count of them in hundreds.

    day: share of the day that is over. weekday: 0 for Monday to 6/7 for Sunday.
    """

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
