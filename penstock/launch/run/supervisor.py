"""Keeps the services of a run alive, and ends them in order.

States of a service: running → (dies) → waiting (back-off) → running, or → done (the learner ends in order),
or the whole run fails. A service that dies is restarted after a growing delay; so is one that ended in order
although the run needs it, an actor after STOPPED_S, because an operator's stop makes actors end as well. Exit
0 of a service that has not announced an end in order is a death.

A service is not restarted after exit 2 (its configuration is wrong), after exit 3 (the run has failed), after
it has waited in vain for longer than HEALTHY_S, and after MAX_FAILURES deaths in a row: that ends the run,
`GaveUp`, with the service's last line. The count of deaths starts again at 0 when the service was ready for
HEALTHY_S (SOUND_S, where it was killed because it made no progress), and when a service that had contributed
to the run was killed: from outside, or an actor that made no progress.

All methods belong to one thread; children's deaths arrive through a queue.
"""

import logging
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Final

from penstock.config.run_folder import NoPlainFile, open_regular
from penstock.launch.inspection.processes import has_delivered, probe
from penstock.launch.run.fork_server import PENSTOCK, ForkServer
from penstock.launch.run.memory import Memory, Trees
from penstock.protocol.limits import SERVER_GONE_S
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE
from penstock.runtime.health import ENDPOINT_VARIABLE, Endpoint, ended_file, read_endpoint
from penstock.runtime.lifecycle import LIFELINE_VARIABLE
from penstock.runtime.retry import full_jitter

log = logging.getLogger(__name__)

# ---- One service as a child process: its own process group, log file and endpoint file.

_TAIL_BYTES: Final = 8192
_PENSTOCK_SECTION: Final = re.compile(r"PENSTOCK_[A-Z]+__")


class CleanExit(Enum):
    """The meaning of an end in order that this process did not order."""

    DONE = "done"
    """Its work is done: the learner, whose end is the end of the run."""
    DIED = "died"
    """Another process has stopped it: the run needs it, so it starts again."""
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


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a child: exit code as the shell counts it, CPU seconds with those of its children.

    in_order: the child announced that it was asked to end, or that its work is done.
    """

    name: str
    pid: int
    code: int
    cpu_seconds: float
    in_order: bool


class ServiceProcess:
    """A running child. Created running; `on_exit` is called once, from a thread, when it ends.

    folder: of the run, with folders `logs` and `endpoints`. environment: what the child reads over its
    configuration file, and the secrets, which no file holds.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        folder: Path,
        lifeline_fd: int,
        environment: Mapping[str, str],
        restarted: bool,
        on_exit: Callable[[Exit], None],
        fork_server: ForkServer | None = None,
    ) -> None:
        self.spec = spec
        self._log = folder / "logs" / f"{spec.name}.log"
        self._endpoint = folder / "endpoints" / f"{spec.name}.json"
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
        on_exit(Exit(self.spec.name, self.pid, code, cpu_seconds=cpu_seconds, in_order=in_order))

    def terminate(self) -> None:
        self._signal(signal.SIGTERM, group=False)

    def ask_stacks(self) -> None:
        """Have the child write the stacks of its threads to its log."""
        self._signal(signal.SIGUSR1, group=False)

    def kill(self) -> None:
        """End the child and whatever it started."""
        self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def endpoint(self) -> Endpoint | None:
        return read_endpoint(self._endpoint)

    def is_ready(self) -> bool:
        endpoint = self.endpoint()
        return endpoint is not None and probe(endpoint, "/readyz") is None

    def last_line(self) -> str:
        return last_line(self._log)


def last_line(log: Path) -> str:
    """Return the last line of a log file that is not empty; "" when there is none."""
    try:
        with open_regular(log) as file:
            return last_line_of(file)
    except (FileNotFoundError, NoPlainFile):
        return ""


def last_line_of(log: IO[bytes]) -> str:
    """Return the last line of an open log that is not empty; "" when there is none."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _TAIL_BYTES))
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def without_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without configuration: the run's file holds it, resolved."""
    return {name: value for name, value in environ.items() if not _PENSTOCK_SECTION.match(name)}


_CRASHES: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
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
    """A service: its current process, and what its earlier processes have shown."""

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

    def count_death(self, death: Exit, last: str) -> str:
        """Count a death, set the time of the restart, and return the cause of the death.

        last: last line of its log. Raises GaveUp when it is not restarted.
        """
        cause = f"unhealthy: {self.red_reason}" if self.red_reason else last
        if not self.red_reason and -death.code in _CRASHES:
            cause = "the environment, or a library that it loads, has crashed"
        if not self.red_reason and death.code == EXIT_OK and not death.in_order:
            cause = "it was not asked to end: what it runs has left the program"
        if self._is_sound_after(death):
            self.failures = 0
            self.delays = full_jitter(BACKOFF_BASE_S, BACKOFF_CAP_S)
        self.failures += 1
        self._check_worth(death, cause)
        self.restart_at_s = time.monotonic() + next(self.delays)
        return cause

    def _is_sound_after(self, death: Exit) -> bool:
        """Return whether the deaths before this one no longer count.

        A `kill -9` from outside is not a fault of a service that has contributed to the run. A kill of an
        actor that made no progress is not either: environments hang, and a restart is the remedy.
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
    """Return how a process ended, in words; a crash by the name of its signal, too."""
    if -code in _CRASHES:
        return f"signal {-code}, {signal.strsignal(-code)}"
    return f"signal {-code}" if code < 0 else f"exit {code}"


RED_LIMIT_S: Final = 30.0
STOPPED_S: Final = 5.0
_STACKS_S: Final = 0.2
_KILL_S: Final = 2.0
_MEMORY_INTERVAL_S: Final = 1.0


class Supervisor:
    """Starts, watches, restarts and stops services."""

    def __init__(
        self,
        folder: Path,
        lifeline_fd: int,
        environment: Mapping[str, str],
        on_event: Callable[[str], None],
        fork_server: ForkServer | None = None,
    ) -> None:
        """fork_server: of which services are copies, where they can be."""
        self._folder = folder
        self._fork_server = fork_server
        self._lifeline_fd = lifeline_fd
        self._environment = environment
        self._on_event = on_event
        self.services: dict[str, Service] = {}
        self._exits: queue.SimpleQueue[Exit | None] = queue.SimpleQueue()
        self._trees = Trees()
        self._memory_read_s = time.monotonic()

    def start(self, spec: ServiceSpec) -> None:
        service = self.services.setdefault(spec.name, Service(spec))
        metrics.RESTARTS.labels(spec.role)  # 0 is there before the first restart: an alert must see it rise
        self._launch(service)

    def wake(self) -> None:
        """End the wait of `step` now. Safe from any thread."""
        self._exits.put(None)

    def step(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a death, restart what is due. Raises GaveUp."""
        if time.monotonic() - self._memory_read_s >= _MEMORY_INTERVAL_S:
            self.note_memory()
        due = [s.restart_at_s for s in self.services.values() if s.restart_at_s is not None]
        wait_s = min([timeout_s, *(max(0.0, at - time.monotonic()) for at in due)])
        for death in self._deaths(wait_s):
            self._on_death(death)
        for service in self.services.values():
            if service.restart_at_s is not None and time.monotonic() >= service.restart_at_s:
                service.restarts += 1
                metrics.RESTARTS.labels(service.spec.role).inc()
                self._launch(service)

    def note_memory(self) -> None:
        """Note how much memory each service has needed, while it still can be read."""
        self._memory_read_s = time.monotonic()
        alive = {s.process.pid: s for s in self.services.values() if s.process is not None}
        for pid, memory in self._trees.look(alive).items():
            alive[pid].memory |= memory

    def note_progress(self) -> None:
        """Note that the run has made new progress, with the services that are running now."""
        for service in self.services.values():
            if service.process is not None and not service.has_helped:
                service.has_helped = service.was_ready or service.process.is_ready()

    def check_health(self) -> None:
        """Look at every `/healthz`; kill, and so restart, what is red or silent for RED_LIMIT_S."""
        for service in self.services.values():
            endpoint = service.process.endpoint() if service.process else None
            reason = probe(endpoint, "/healthz") if endpoint else None
            if endpoint is not None and not service.was_ready:
                service.was_ready = probe(endpoint, "/readyz") is None
            if service.process is None or endpoint is None or reason is None:
                service.red_since_s = None
            elif service.red_since_s is None:
                service.red_since_s = time.monotonic()
                log.warning("unhealthy", extra={"service": service.spec.name, "reason": reason})
            elif time.monotonic() - service.red_since_s > RED_LIMIT_S:
                service.red_since_s, service.red_reason = None, reason
                service.has_helped |= has_delivered(service.spec.name, endpoint)
                self._on_event(f"{service.spec.name} is unhealthy ({reason}): killed")
                service.process.ask_stacks()
                service.process.kill()

    def is_done(self, name: str) -> bool:
        service = self.services[name]
        return service.process is None and service.restart_at_s is None

    def unready(self) -> list[tuple[str, str]]:
        """Services whose `/readyz` is not green (yet), with the last line of their logs."""
        return [
            (name, service.process.last_line())
            for name, service in self.services.items()
            if service.process is not None and not service.process.is_ready()
        ]

    def endpoints(self) -> dict[str, Endpoint]:
        return {
            name: endpoint
            for name, service in self.services.items()
            if service.process is not None and (endpoint := service.process.endpoint()) is not None
        }

    def accounts(self) -> list[Account]:
        """One per service, in starting order; CPU seconds are those of processes that ended."""
        return [
            Account(
                name=name, role=one.spec.role, pid=one.last_pid, restarts=one.restarts,
                cpu_seconds=one.cpu_seconds, memory=one.memory,
            )
            for name, one in self.services.items()
        ]  # fmt: skip

    def stop(self, names: Iterable[str], grace_s: float) -> list[str]:
        """Ask services to drain and wait up to `grace_s`; returns the names of those still running."""
        self.note_memory()
        return self._end(names, ServiceProcess.terminate, grace_s)

    def kill(self, names: Iterable[str]) -> None:
        late = self._end(names, ServiceProcess.ask_stacks, _STACKS_S)
        for name in late:
            self._on_event(f"{name} did not drain in time: killed; its log tells where it was")
        self._end(late, ServiceProcess.kill, _KILL_S)

    def _end(self, names: Iterable[str], ask: Callable[[ServiceProcess], None], grace_s: float) -> list[str]:
        chosen = [self.services[name] for name in names if name in self.services]
        for service in chosen:
            service.restart_at_s = None
            if service.process is not None:
                ask(service.process)
        deadline = time.monotonic() + grace_s
        while alive := [s.spec.name for s in chosen if s.process is not None]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return alive
            for death in self._deaths(left_s):
                self._settle(death)
        return []

    def names(self, stage: DrainStage) -> list[str]:
        """Return the services of a stage of the drain, in starting order."""
        return [name for name, service in self.services.items() if service.spec.stage is stage]

    def _launch(self, service: Service) -> None:
        service.restart_at_s = service.red_since_s = None
        service.was_ready, service.has_helped, service.red_reason = False, False, ""
        service.started_s = time.monotonic()
        service.process = ServiceProcess(
            service.spec,
            folder=self._folder,
            lifeline_fd=self._lifeline_fd,
            environment=self._environment,
            restarted=service.restarts > 0,
            on_exit=self._exits.put,
            fork_server=self._fork_server,
        )
        service.last_pid = service.process.pid
        verb = "restarted" if service.restarts else "started"
        log.info("%s", verb, extra={"service": service.spec.name, "pid": service.process.pid})

    def _deaths(self, wait_s: float) -> Iterator[Exit]:
        with suppress(queue.Empty):
            death = self._exits.get(timeout=wait_s) if wait_s > 0 else self._exits.get_nowait()
            while True:
                if death is not None:
                    yield death
                death = self._exits.get_nowait()

    def _settle(self, death: Exit) -> tuple[Service, str]:
        service = self.services[death.name]
        cause = service.process.last_line() if service.process else ""
        if service.process is not None and service.process.pid == death.pid:
            service.process = None
        service.cpu_seconds += death.cpu_seconds
        return service, cause

    def _on_death(self, death: Exit) -> None:
        service, last = self._settle(death)
        if death.in_order and service.spec.clean_exit is not CleanExit.DIED:
            log.info("ended", extra={"service": service.spec.name})
            if service.spec.clean_exit is CleanExit.STOPPED:
                self._on_event(f"{service.spec.name} ended (exit 0), restarting unless the run ends")
                service.restart_at_s = time.monotonic() + STOPPED_S
            return
        cause = service.count_death(death, last)
        has_cause = death.code >= 0 or -death.code in _CRASHES
        why = f": {cause}" if cause and has_cause and not death.in_order else ""
        self._on_event(f"{death.name} died ({how(death.code)}), restarting{why}")


# ---- Deadlines of the stages of a drain, in seconds since its start.

_ACTING_S: Final = 4.0
_BEHIND_S: Final = {DrainStage.LEARNER: 7.0, DrainStage.BROKER: 8.5, DrainStage.REDIS: 10.5}
"""Counted from the end of the stages before the learner's."""


def gone_by(*, serves: bool) -> Mapping[DrainStage, float]:
    """Return the deadlines of the stages, in order. serves: the run has services of the stage SERVING."""
    before = _ACTING_S + (SERVER_GONE_S if serves else 0.0)
    behind = {stage: before + after for stage, after in _BEHIND_S.items()}
    return {DrainStage.ACTING: _ACTING_S, DrainStage.SERVING: before, **behind}
