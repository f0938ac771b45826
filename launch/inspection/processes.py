"""One look at each process of a run: is it there, is it well, what has it counted.

Asks the HTTP port that the process has announced in the run's `endpoints.json`; the port of a process that has ended
may be another's by now, so a pid that is gone, or an answer in another role, counts as no answer.
"""

import http.client
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from launch.process import probe
from penstock.runtime.health import Endpoint

ENDPOINTS_FILE: Final = "endpoints.json"
_TIMEOUT_S: Final = 1.0
_AT_ONCE: Final = 16
_STATES: Final = {"T": "stands still: stopped by a signal", "t": "stands still: held by a debugger"}

Sample = tuple[str, Mapping[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A process at a moment. problem: why it is not well, "" when it is. samples: name, labels, value."""

    name: str
    role: str
    pid: int
    at_s: float
    ended: bool = False
    problem: str = ""
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the samples `penstock_NAME` with these labels; None when there is none."""
        found = [
            value
            for sample, has, value in self.samples
            if sample == f"penstock_{name}" and labels.items() <= has.items()
        ]
        return sum(found) if found else None


def read_endpoints(run_dir: Path) -> dict[str, Endpoint]:
    """The processes that the launcher has seen come up, by name; empty before the first."""
    try:
        content = json.loads((run_dir / ENDPOINTS_FILE).read_text())
    except FileNotFoundError:
        return {}
    return {name: Endpoint(**values) for name, values in content.items()}


def look_at_all(endpoints: Mapping[str, Endpoint]) -> tuple[Sight, ...]:
    """All processes at once: one that is silent costs its timeout once."""
    if not endpoints:
        return ()
    with ThreadPoolExecutor(min(_AT_ONCE, len(endpoints)), thread_name_prefix="look") as pool:
        return tuple(pool.map(look, endpoints.keys(), endpoints.values()))


def look(name: str, endpoint: Endpoint) -> Sight:
    """One process."""
    seen = Sight(name=name, role=endpoint.role, pid=endpoint.pid, at_s=time.monotonic())
    if not is_alive(endpoint.pid):
        return replace(seen, ended=True, problem="has ended")
    standstill = _STATES.get(_state(endpoint.pid))
    if standstill:
        return replace(seen, problem=standstill)
    problem = probe(endpoint, "/healthz") or ""
    try:
        samples = _scrape(endpoint)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return replace(seen, problem=problem or f"/metrics does not answer: {error}")
    if not _is_of(endpoint.role, samples):
        return replace(seen, ended=True, problem="has ended: another process has its port")
    return replace(seen, at_s=time.monotonic(), problem=problem, samples=samples)


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state(pid) != "Z"


def _state(pid: int) -> str:
    """The letter of /proc/PID/stat; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _scrape(endpoint: Endpoint) -> tuple[Sample, ...]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.metrics_port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status != HTTPStatus.OK:
            raise http.client.HTTPException(f"status {reply.status}")
    finally:
        connection.close()
    return tuple(_samples(text))


def _samples(text: str) -> Iterable[Sample]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                yield sample.name, sample.labels, sample.value


def _is_of(role: str, samples: tuple[Sample, ...]) -> bool:
    return any(name == "penstock_cpu_seconds_total" and has.get("role") == role for name, has, _ in samples)
