"""Examine each process of a run: whether it runs, whether it is healthy, and its counters.

The HTTP port of a process is in the run's `endpoints.json`. Port and pid of a process that has ended may
belong to another one by now: an answer in another role does not count, and a silent process that is younger
than the file is another one.
"""

import http.client
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

from penstock.config.run_folder import open_regular, read_whole
from penstock.config.settings import ConfigurationError
from penstock.launch.inspection.curve import parse_line
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Endpoint
from penstock.v1 import control_pb2

# ---- The health of a process, by its HTTP port.

_TIMEOUT_S: Final = 1.0


def probe(endpoint: Endpoint, path: str) -> str | None:
    """Return None when a page, `/healthz` or `/readyz`, answers 200, else the reason."""
    try:
        status, reason = _get(endpoint, path)
    except (OSError, http.client.HTTPException) as error:
        return f"does not answer: {error}"
    return None if status == HTTPStatus.OK else reason.decode(errors="replace").strip()


def _get(endpoint: Endpoint, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.metrics_port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


ENDPOINTS_FILE: Final = "endpoints.json"
_AT_ONCE: Final = 16
_CLOCKS_S: Final = 5.0
"""Seconds by which the clocks of files and processes may differ."""
_STANDSTILL: Final = {
    psutil.STATUS_STOPPED: "stands still: stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stands still: held by a debugger",
}

Sample = tuple[str, Mapping[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A process at a moment. problem: why it is unhealthy, "": it is not. samples: name, labels, value."""

    name: str
    role: str
    pid: int
    at_s: float
    ended: bool = False
    problem: str = ""
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples `penstock_NAME` with these labels; None when there is none."""
        found = [
            value
            for sample, has, value in self.samples
            if sample == f"penstock_{name}" and labels.items() <= has.items()
        ]
        return sum(found) if found else None


def read_endpoints(run_dir: Path) -> dict[str, Endpoint]:
    """Return the processes that the launcher has seen start, by name; empty before the first.

    Raises ConfigurationError for a damaged file.
    """
    try:
        content = json.loads(read_whole(run_dir / ENDPOINTS_FILE))
        return {name: Endpoint(**values) for name, values in content.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{run_dir / ENDPOINTS_FILE}: no list of processes: {error}") from error


def broker_of(endpoints: Mapping[str, Endpoint]) -> str:
    """Return the address of the first broker; "" where there is none yet."""
    return next((str(one.address) for one in endpoints.values() if one.role == "broker"), "")


def look_at_all(run_dir: Path) -> tuple[ProcessSnapshot, ...]:
    """Examine all processes of a run in parallel, so that silent ones cost one timeout together."""
    endpoints = read_endpoints(run_dir)
    if not endpoints:
        return ()
    announced_at = (run_dir / ENDPOINTS_FILE).stat().st_mtime
    with ThreadPoolExecutor(min(_AT_ONCE, len(endpoints)), thread_name_prefix="look") as pool:
        looks = [pool.submit(look, name, one, announced_at) for name, one in endpoints.items()]
        return tuple(one.result() for one in looks)


def look(name: str, endpoint: Endpoint, announced_at: float) -> ProcessSnapshot:
    """Examine one process. announced_at: Unix time at which it was known to live."""
    seen = ProcessSnapshot(name=name, role=endpoint.role, pid=endpoint.pid, at_s=time.monotonic())
    ended = replace(seen, ended=True, problem="has ended")
    if not is_alive(endpoint.pid):
        return ended
    standstill = _STANDSTILL.get(_status(endpoint.pid))
    problem, samples = (standstill, ()) if standstill else _ask(endpoint)
    if not samples:
        return ended if _is_younger(endpoint.pid, announced_at) else replace(seen, problem=problem)
    if not any(
        name == "penstock_cpu_seconds_total" and has.get("role") == endpoint.role for name, has, _ in samples
    ):
        return ended
    return replace(seen, at_s=time.monotonic(), problem=problem, samples=samples)


def has_delivered(name: str, endpoint: Endpoint) -> bool:
    """Return whether a living process has had a fragment acknowledged; False without an answer."""
    return bool(look(name, endpoint, announced_at=time.time()).total("fragments_acked_total"))


def is_alive(pid: int) -> bool:
    """Return whether a process of this number runs; a zombie does not."""
    return _status(pid) not in {"", psutil.STATUS_ZOMBIE}


def _status(pid: int) -> str:
    """Return a STATUS_ name of psutil, "hidden" for one that may not be read, "" without a process."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""
    except psutil.AccessDenied:
        return "hidden"


def _is_younger(pid: int, unix_s: float) -> bool:
    """Return whether a process began after that time; False where there is no /proc."""
    try:
        return psutil.Process(pid).create_time() > unix_s + _CLOCKS_S
    except psutil.Error:
        return False


def _ask(endpoint: Endpoint) -> tuple[str, tuple[Sample, ...]]:
    """Return why the process is not healthy, "" when it is, and its samples, () without an answer."""
    problem = probe(endpoint, "/healthz") or ""
    try:
        status, text = _get(endpoint, "/metrics")
        if status != HTTPStatus.OK:
            return problem or f"/metrics does not answer: status {status}", ()
        return problem, tuple(
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        )
    except (OSError, http.client.HTTPException, ValueError) as error:
        return problem or f"/metrics does not answer: {error}", ()


# ---- The visible state of a run at one moment: its processes, its broker's status, the learner's newest
# lines.

METRICS_FILE: Final = "metrics.jsonl"
_TAIL_BYTES: Final = 256 * 1024

Ask = Callable[[], control_pb2.StatusReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The newest line of `metrics.jsonl`, and when `updates` last rose in the lines read (Unix time)."""

    row: dict[str, Any]
    update_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The visible state of a run at one moment.

    status: the broker's reply, None without one; silence: why there is none. learnt: None before the first
    line.
    """

    at_s: float
    wall_s: float
    sights: tuple[ProcessSnapshot, ...]
    status: control_pb2.StatusReply | None
    silence: str = ""
    learnt: Learnt | None = field(default=None, repr=False)

    def of_role(self, *roles: str) -> tuple[ProcessSnapshot, ...]:
        return tuple(snapshot for snapshot in self.sights if snapshot.role in roles)


def observe(run_dir: Path, ask: Ask) -> Observation:
    """Return the state of a run. ask: calls the broker's Status, or raises Fatal."""
    sights = look_at_all(run_dir)
    status, silence = _asked(ask, sights)
    return Observation(
        at_s=time.monotonic(),
        wall_s=time.time(),
        sights=sights,
        status=status,
        silence=silence,
        learnt=read_learnt(run_dir / METRICS_FILE),
    )


def is_going_on(run_dir: Path) -> bool:
    """Return whether any process that the run has announced still lives."""
    alive = {name: one for name, one in read_endpoints(run_dir).items() if is_alive(one.pid)}
    if not alive:
        return False
    announced_at = (run_dir / ENDPOINTS_FILE).stat().st_mtime
    return any(not look(name, one, announced_at).ended for name, one in alive.items())


def read_learnt(path: Path) -> Learnt | None:
    """Return the newest line, from the end of a `metrics.jsonl`; None while it is missing or empty."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            rows = [row for row in map(parse_line, file.read().split(b"\n")) if row is not None]
    except FileNotFoundError:
        return None
    if not rows:
        return None
    newest = rows[-1]
    made = [row for row in rows if row.get("updates", 0) == newest.get("updates", 0)]
    return Learnt(row=newest, update_at=made[0].get("time") if newest.get("updates") else None)


def _asked(ask: Ask, sights: tuple[ProcessSnapshot, ...]) -> tuple[control_pb2.StatusReply | None, str]:
    """Return the broker's reply, or why there is none, without waiting for a broker that is known to hang."""
    brokers = [snapshot for snapshot in sights if snapshot.role == "broker"]
    if brokers and all(snapshot.problem and not snapshot.samples for snapshot in brokers):
        return None, f"{brokers[0].name} {brokers[0].problem}"
    try:
        return ask(), ""
    except (Fatal, ConfigurationError) as error:
        return None, str(error)
