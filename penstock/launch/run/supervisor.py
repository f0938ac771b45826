"""Keeps the services of a run alive, and ends them in order.

States of a service: running → (dies) → waiting (back-off) → running, or → done (one whose work can be done
ends in order), or the whole run fails. A service that dies gets restarted after a growing delay; so does one
that somebody else has asked to end, an actor after STOPPED_S, since an operator's stop makes it end as well.
Exit 0 of a service that does not say that it ends in order is a death like others.

A service that is not worth another start (`penstock.launch.run.supervised_service`) ends the run: `GaveUp`,
with the service's last line. All methods belong to one thread; children's deaths arrive through a queue.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from penstock.launch.inspection.processes import has_delivered, probe
from penstock.launch.run.fork_server import ForkServer
from penstock.launch.run.memory import Trees
from penstock.launch.run.supervised_service import (
    Account,
    CleanExit,
    DrainStage,
    Exit,
    Folder,
    Service,
    ServiceProcess,
    ServiceSpec,
    how,
)
from penstock.protocol.limits import SERVER_GONE_S
from penstock.runtime import metrics
from penstock.runtime.health import Endpoint

RED_LIMIT_S: Final = 30.0
STOPPED_S: Final = 5.0
_STACKS_S: Final = 0.2
_KILL_S: Final = 2.0
_MEMORY_INTERVAL_S: Final = 1.0

log = logging.getLogger(__name__)


class Supervisor:
    """Starts, watches, restarts and stops services."""

    def __init__(
        self,
        folder: Folder,
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
        metrics.RESTARTS.labels(spec.role)  # 0 is told before the first: an alert must see it rise
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
        """The run has come further than ever, with the services that are running now."""
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
        found = {
            name: service.process.endpoint()
            for name, service in self.services.items()
            if service.process is not None
        }
        return {name: endpoint for name, endpoint in found.items() if endpoint is not None}

    def accounts(self) -> list[Account]:
        """One per service, in starting order; CPU seconds are those of processes that ended."""
        return [
            Account(
                name=name,
                role=service.spec.role,
                pid=service.last_pid,
                restarts=service.restarts,
                cpu_seconds=service.cpu_seconds,
                memory=service.memory,
            )
            for name, service in self.services.items()
        ]

    def stop(self, names: Iterable[str], grace_s: float) -> list[str]:
        """Ask services to drain and wait up to `grace_s`; returns the names of those still running."""
        self.note_memory()
        chosen = [self.services[name] for name in names if name in self.services]
        for service in chosen:
            service.restart_at_s = None
            if service.process is not None:
                service.process.terminate()
        return self._await_end(chosen, grace_s)

    def kill(self, names: Iterable[str]) -> None:
        chosen = [self.services[name] for name in names if name in self.services]
        for service in chosen:
            service.restart_at_s = None
            if service.process is not None:
                service.process.ask_stacks()
        self._await_end(chosen, _STACKS_S)
        for service in chosen:
            if service.process is not None:
                self._on_event(
                    f"{service.spec.name} did not drain in time: killed; its log tells where it was"
                )
                service.process.kill()
        self._await_end(chosen, _KILL_S)

    def names(self, stage: DrainStage | None = None) -> list[str]:
        """Return them in starting order: of one stage of the drain, or all."""
        return [name for name, service in self.services.items() if stage in (None, service.spec.stage)]

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
        service, said = self._settle(death)
        if death.in_order and service.spec.clean_exit is not CleanExit.DIED:
            self._on_end(service)
            return
        cause = service.count_death(death, said)
        why = f": {cause}" if cause and death.code >= 0 and not death.in_order else ""
        self._on_event(f"{death.name} died ({how(death.code)}), restarting{why}")

    def _on_end(self, service: Service) -> None:
        log.info("ended", extra={"service": service.spec.name})
        if service.spec.clean_exit is CleanExit.STOPPED:
            self._on_event(f"{service.spec.name} ended (exit 0), restarting unless the run ends")
            service.restart_at_s = time.monotonic() + STOPPED_S

    def _await_end(self, services: Sequence[Service], grace_s: float) -> list[str]:
        deadline = time.monotonic() + grace_s
        while alive := [s.spec.name for s in services if s.process is not None]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return alive
            for death in self._deaths(left_s):
                self._settle(death)
        return []


# ---- By when the services of each stage of a drain shall be gone, in order, in seconds since it began.

_ACTING_S: Final = 4.0
_BEHIND_S: Final = {DrainStage.LEARNER: 7.0, DrainStage.BROKER: 8.5, DrainStage.REDIS: 10.5}
"""Since the stages before the learner's are over."""


def gone_by(*, serves: bool) -> Mapping[DrainStage, float]:
    """Return the bounds of a run. serves: it has services between actors and learner, which may flush."""
    before = _ACTING_S + (SERVER_GONE_S if serves else 0.0)
    behind = {stage: before + after for stage, after in _BEHIND_S.items()}
    return {DrainStage.ACTING: _ACTING_S, DrainStage.SERVING: before, **behind}
