"""A service that is kept alive: its process, and whether it is started again when that has died.

It is not after exit 2 (its configuration will not get better), after exit 3 (the run has failed), after it
has waited in vain for longer than HEALTHY_S, and after MAX_FAILURES deaths in a row. The row begins anew
when the service was ready for HEALTHY_S (SOUND_S, where it was killed because it made no progress), and
where one that has helped the run on was killed: from outside, or an actor that made no progress.
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.launch.run.child_process import Exit, ServiceProcess, ServiceSpec
from penstock.launch.run.memory import NO_MEMORY, Memory
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE
from penstock.runtime.retry import full_jitter

MAX_FAILURES: Final = 5
HEALTHY_S: Final = 30.0
SOUND_S: Final = 3600.0
BACKOFF_BASE_S: Final = 0.2
BACKOFF_CAP_S: Final = 5.0


class GaveUp(Exception):
    """A service keeps dying. `code` is what the launcher should exit with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a service has used so far, over all its restarts."""

    name: str
    role: str
    pid: int
    restarts: int
    cpu_seconds: float
    memory: Memory = NO_MEMORY
    """Of the life that needed most, with all that it started."""


@dataclass(slots=True)
class Service:
    """A service, its process of today, and what its lives before have shown."""

    spec: ServiceSpec
    process: ServiceProcess | None = None
    started_s: float = 0.0
    restart_at_s: float | None = None
    failures: int = 0
    restarts: int = 0
    red_since_s: float | None = None
    was_ready: bool = False
    has_helped: bool = False
    """The run has come further while it was ready, or it has had a fragment acknowledged."""
    red_reason: str = ""
    cpu_seconds: float = 0.0
    last_pid: int = 0
    memory: Memory = NO_MEMORY
    delays: Iterator[float] = field(default_factory=lambda: full_jitter(BACKOFF_BASE_S, BACKOFF_CAP_S))

    @property
    def lived_s(self) -> float:
        """The seconds since it was started."""
        return time.monotonic() - self.started_s

    def count_death(self, death: Exit, said: str) -> str:
        """Count a death, set when the service is started again, and return why it died.

        said: the last line that it wrote. Raises GaveUp when it is not started again.
        """
        cause = self._cause(death, said)
        if self._is_sound_after(death):
            self.failures = 0
            self.delays = full_jitter(BACKOFF_BASE_S, BACKOFF_CAP_S)
        self.failures += 1
        self._check_worth(death, cause)
        self.restart_at_s = time.monotonic() + next(self.delays)
        return cause

    def _cause(self, death: Exit, said: str) -> str:
        """Return why it died, as far as that is known."""
        if self.red_reason:
            return f"unhealthy: {self.red_reason}"
        if death.code == EXIT_OK and not death.in_order:
            return "it was not asked to end: what it runs has left the program"
        return said

    def _is_sound_after(self, death: Exit) -> bool:
        """Return whether the deaths before this one count no more.

        A `kill -9` says nothing about a service that has helped the run on. Nor does one for standing still
        about an actor: its environment hangs now and then, and starting it again is the remedy.
        """
        is_excused = self.spec.role == "actor" if self.red_reason else death.code == -signal.SIGKILL
        if self.has_helped and is_excused:
            return True
        return self.was_ready and self.lived_s > (SOUND_S if self.red_reason else HEALTHY_S)

    def _check_worth(self, death: Exit, cause: str) -> None:
        """Raise GaveUp when it is not worth a restart."""
        name, ended = self.spec.name, how(death.code)
        if death.code == EXIT_USAGE:
            raise GaveUp(cause or f"{name}: {ended}", EXIT_USAGE)
        if death.code == EXIT_RUN_FAILED:
            raise GaveUp(cause or f"{name} ({ended}) left no last line: is its disk full?", EXIT_FAILED)
        if death.code == EXIT_FAILED and self.lived_s > HEALTHY_S and not self.was_ready:
            raise GaveUp(f"{name} failed ({ended}): {cause}", EXIT_FAILED)
        if self.failures >= MAX_FAILURES:
            raise GaveUp(f"{name} failed {self.failures} times in a row ({ended}): {cause}", EXIT_FAILED)


def how(code: int) -> str:
    """Return in words how a process ended that had this exit code."""
    return f"signal {-code}" if code < 0 else f"exit {code}"
