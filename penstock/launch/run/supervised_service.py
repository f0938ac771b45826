"""A service that is kept alive: its process, and whether it is started again when that has died.

It is not after exit 2 (its configuration will not get better), after exit 3 (the run has failed), after it
has waited in vain for longer than HEALTHY_S, and after MAX_FAILURES deaths in a row. The row begins anew
when the service was ready for HEALTHY_S (SOUND_S, where it was killed because it made no progress), and
where one that has helped the run on was killed: from outside, or an actor that made no progress.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from penstock.config.run_folder import NoPlainFile, open_regular
from penstock.launch.inspection.processes import probe
from penstock.launch.run.fork_server import PENSTOCK, ForkServer
from penstock.launch.run.memory import Memory
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE
from penstock.runtime.health import ENDPOINT_VARIABLE, Endpoint, ended_file, read_endpoint
from penstock.runtime.lifecycle import LIFELINE_VARIABLE
from penstock.runtime.retry import full_jitter

# ---- One service as a child process: its own process group, log file and endpoint file.

_TAIL_BYTES: Final = 8192
_PENSTOCK_SECTION: Final = re.compile(r"PENSTOCK_[A-Z]+__")


class CleanExit(Enum):
    """What it means when a service ends in order without being asked to."""

    DONE = "done"
    """Its work is done: the learner, whose end is the end of the run."""
    DIED = "died"
    """Somebody else has made it drain: it is needed, so it is started again."""
    STOPPED = "stopped"
    """Either: actors also end when an operator stops the run. Started again unless the run ends soon."""


class DrainStage(Enum):
    """When a service drains, first to last: the way of a fragment."""

    ACTING = "acting"
    SERVING = "serving"
    """Those that act or answer for others: the policy server and the services of a workload."""
    LEARNER = "learner"
    BROKER = "broker"
    REDIS = "redis"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """What to start: `command`, with `on_restart` behind it from the second time on.

    role: its name in metrics and in the summary. stage: when it drains.
    """

    name: str
    role: str
    command: tuple[str, ...]
    on_restart: tuple[str, ...] = ()
    clean_exit: CleanExit = CleanExit.DIED
    stage: DrainStage = DrainStage.SERVING


def penstock(*arguments: str) -> tuple[str, ...]:
    """The command line of `penstock ARGUMENTS` by this interpreter; -P: a folder here hides no package."""
    return (*PENSTOCK, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a child: exit code as the shell counts it, CPU seconds with those of its children.

    in_order: the child said that it was asked to end or has done its work.
    """

    name: str
    pid: int
    code: int
    cpu_seconds: float
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Where services of one run write."""

    logs: Path
    endpoints: Path


class ServiceProcess:
    """A running child. Created running; `on_exit` is called once, from a thread, when it ends.

    `environment`: what the child reads over its configuration file, and the secrets, which no file holds.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        folder: Folder,
        lifeline_fd: int,
        environment: Mapping[str, str],
        restarted: bool,
        on_exit: Callable[[Exit], None],
        fork_server: ForkServer | None = None,
    ) -> None:
        self.spec = spec
        self._log = folder.logs / f"{spec.name}.log"
        self._endpoint = folder.endpoints / f"{spec.name}.json"
        self._endpoint.unlink(missing_ok=True)
        self._ended = ended_file(self._endpoint)
        self._ended.unlink(missing_ok=True)
        own = {LIFELINE_VARIABLE: str(lifeline_fd), ENDPOINT_VARIABLE: str(self._endpoint)}
        command = (*spec.command, *(spec.on_restart if restarted else ()))
        environment = without_configuration(os.environ) | dict(environment) | own
        with self._log.open("ab") as log:
            given = (command, environment, log.fileno(), lifeline_fd)
            pid = fork_server.start(*given) if fork_server else None
            self._program: subprocess.Popen[bytes] | None = None
            if pid is None:
                self._program = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=(lifeline_fd,),
                    process_group=0,
                )
                pid = self._program.pid
        self.pid = pid
        threading.Thread(target=self._wait, args=(on_exit,), name=f"wait-{spec.name}", daemon=True).start()

    def _wait(self, on_exit: Callable[[Exit], None]) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # Whatever it started and left behind goes too; while it is not reaped its group is surely its own.
        self.kill()
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if self._program is not None:
            self._program.returncode = code
        cpu_seconds = usage.ru_utime + usage.ru_stime
        in_order = code == EXIT_OK and self._ended.exists()
        on_exit(
            Exit(name=self.spec.name, pid=self.pid, code=code, cpu_seconds=cpu_seconds, in_order=in_order)
        )

    def terminate(self) -> None:
        self._signal(signal.SIGTERM, group=False)

    def ask_stacks(self) -> None:
        """Have the child write the stacks of its threads to its log."""
        self._signal(signal.SIGUSR1, group=False)

    def kill(self) -> None:
        """End the child and whatever it started."""
        self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except ProcessLookupError:
            return

    def endpoint(self) -> Endpoint | None:
        return read_endpoint(self._endpoint)

    def is_ready(self) -> bool:
        endpoint = self.endpoint()
        if endpoint is None:
            return False
        return probe(endpoint, "/readyz") is None

    def last_line(self) -> str:
        return last_line(self._log)


def last_line(log: Path) -> str:
    """Return the last line of a log file that is not empty; "" when there is none."""
    try:
        with open_regular(log) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except (FileNotFoundError, NoPlainFile):
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def without_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without configuration: the run's file holds it, resolved."""
    return {name: value for name, value in environ.items() if not _PENSTOCK_SECTION.match(name)}


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
    memory: Memory = field(default_factory=Memory)
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
    memory: Memory = field(default_factory=Memory)
    delays: Iterator[float] = field(default_factory=lambda: full_jitter(BACKOFF_BASE_S, BACKOFF_CAP_S))

    @property
    def lived_s(self) -> float:
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
    return f"signal {-code}" if code < 0 else f"exit {code}"
