"""The API of prompts hop by hop: bare FastAPI, bare Act of the same server, and `select_action` over both.

One gateway with a run of its own, of the recipe's very network; the client is another process. The CPU time
of a call is that of the process that answers, and of the policy server behind it. Then an update of 2,047
steps that were stored over HTTP, 4 epochs of minibatches of 64, and what each process holds in memory.
"""

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.child import child
from benchmarks.prompts_load import body_of
from benchmarks.table import Cell, Options, Table
from launch.inspection.processes import read_endpoints
from launch.run.child_process import penstock
from penstock.runtime.health import read_endpoint
from penstock.wire.limits import MIB

SECONDS: Final = 2.0
STEPS: Final = 2047
"""One below a batch, which would be learned from unasked."""
UPDATES: Final = 3
AIM: Final = "p50 5 ms, p99 15 ms; 16 in flight 400 per s on two cores"
_PATIENCE_S: Final = 180.0
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_HEADERS: Final = {"Content-Type": "application/json"}

Ask = Callable[[str, str, int], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Answering:
    """Who answers. address: for HTTP. server: of the policy server. pids: of the processes, by their role."""

    address: str
    server: str
    bare: str
    pids: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kind of call. what: a word of `prompts_load`. by: roles whose CPU time counts."""

    name: str
    what: str
    by: tuple[str, ...]
    in_flight: int = 1


_BOTH: Final = ("gateway", "server")
ROWS: Final = (
    Row(name="bare FastAPI, 30 KB of numbers", what="numbers", by=("bare",)),
    Row(name="bare FastAPI, 8 KB of base64", what="base64", by=("bare",)),
    Row(name="bare Act over gRPC", what="act", by=("server",)),
    Row(name="select_action, numbers", what="numbers", by=_BOTH),
    Row(name="select_action, base64", what="base64", by=_BOTH),
    Row(name="bare Act, 16 in flight", what="act", by=("server",), in_flight=16),
    Row(name="select_action, numbers, 16 in flight", what="numbers", by=_BOTH, in_flight=16),
    Row(name="select_action, base64, 16 in flight", what="base64", by=_BOTH, in_flight=16),
)


def table(options: Options) -> Table:
    """Return the rows; each figure is the median over the rounds, in which all rows take turns."""
    with _answering() as there, _client() as ask:
        rounds = [[_measured(ask, row, there) for row in ROWS] for _ in range(options.repeat)]
        updates = [_update(there) for _ in range(UPDATES)]
        memory = {role: resident_mib(pid) for role, pid in there.pids.items() if role != "bare"}
    rows: list[list[Cell]] = [
        [row.name, *(statistics.median(one[at][name] for one in rounds) for name in _COLUMNS)]
        for at, row in enumerate(ROWS)
    ]
    wall_s, cpu_s = (statistics.median(one[at] for one in updates) for at in (0, 1))
    return Table(
        title="select_action of the API of prompts, hop by hop",
        columns=("", "per s", "p50 ms", "p99 ms", "CPU µs of the answer"),
        rows=rows,
        note=f"aim: {AIM}. An update of {STEPS:,} steps × 4 epochs of minibatches of 64 takes {wall_s:.1f} s "
        f"({cpu_s:.1f} CPU s of the learner). MiB: "
        + ", ".join(f"{role} {size:.0f}" for role, size in sorted(memory.items())),
    )


_COLUMNS: Final = ("rate", "p50_ms", "p99_ms", "cpu_us")


def _measured(ask: Ask, row: Row, there: Answering) -> dict[str, float]:
    address = {"bare": there.bare, "server": there.server}.get(row.by[0], there.address)
    before = sum(_cpu_s(there.pids[role]) for role in row.by)
    told = ask(row.what, address, row.in_flight)
    spent = sum(_cpu_s(there.pids[role]) for role in row.by) - before
    return told | {"cpu_us": 1e6 * spent / told["calls"]}


def _update(there: Answering) -> tuple[float, float]:
    """Store what an update takes; return the seconds of the update, and the learner's CPU seconds."""
    line = http.client.HTTPConnection(there.address, timeout=_PATIENCE_S)
    state = json.loads(body_of("base64"))["embedding"]
    for _ in range(STEPS):
        answer = _posted(line, "/select_action", embedding=state)
        given = {name: answer[name] for name in ("action", "log_prob", "value", "ticket")}
        _posted(line, "/store_experience", state=state, reward=0.5, next_state=state, done=True, **given)
    began_s, spent_s = time.monotonic(), _cpu_s(there.pids["learner"])
    made = _posted(line, "/update")
    seconds = time.monotonic() - began_s
    line.close()
    if made["steps"] != STEPS:
        raise RuntimeError(f"the update took {made['steps']} steps, not {STEPS}")
    return seconds, _cpu_s(there.pids["learner"]) - spent_s


def _posted(line: http.client.HTTPConnection, route: str, /, **body: Any) -> dict[str, Any]:
    line.request("POST", route, json.dumps(body), _HEADERS)
    reply = line.getresponse()
    text = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{route}: {text!r}")
    return dict(json.loads(text))


@contextmanager
def _client() -> Iterator[Ask]:
    """Yield the client process, which makes one measurement after the other."""
    with child(["-m", "benchmarks.prompts_load"], pipes=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        write, read = process.stdin, process.stdout

        def ask(what: str, address: str, in_flight: int) -> dict[str, float]:
            line = f"{what} {address} --in-flight {in_flight} --seconds {SECONDS}\n"
            write.write(line)
            write.flush()
            told = read.readline()
            if not told:
                raise RuntimeError(f"the client failed: {line}")
            figures: dict[str, float] = json.loads(told)
            return figures

        yield ask
        write.close()


@contextmanager
def _answering() -> Iterator[Answering]:
    """Start a gateway with its run, and bare FastAPI; both end at the end."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, bare_fastapi() as (bare, bare_pid):
        state, endpoints = Path(name) / "state", Path(name) / "gateway.json"
        words = ("gateway", "prompts", "--listen", "127.0.0.1:0", "--state", str(state))
        with (Path(name) / "log").open("wb") as log:
            gateway = subprocess.Popen(
                penstock(*words, "--endpoints", str(endpoints)), stdout=log, stderr=log, cwd=name
            )
        try:
            address = _healthy(gateway, endpoints, Path(name) / "log")
            found = read_endpoints(state / "run").values()
            pids = {one.role: one.pid for one in found}
            server = next(str(one.address) for one in found if one.role == "server")
            yield Answering(address, server, bare, pids | {"gateway": gateway.pid, "bare": bare_pid})
        finally:
            gateway.terminate()
            gateway.wait(_PATIENCE_S)


def _healthy(gateway: "subprocess.Popen[bytes]", endpoints: Path, log: Path) -> str:
    """Return the address of a gateway once actions are given."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        found = read_endpoint(endpoints)
        if found is not None and _status(str(found.address)) == 200:
            return str(found.address)
        if gateway.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the gateway does not come up: {log.read_text()}")
        time.sleep(0.1)


def _status(address: str) -> int:
    line = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
    line.request("GET", "/health")
    status = line.getresponse().status
    line.close()
    return status


@contextmanager
def bare_fastapi() -> Iterator[tuple[str, int]]:
    """Start bare FastAPI; yields its address and its process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_fastapi", str(port)])
    try:
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def resident_mib(pid: int) -> float:
    """Return what a process holds in memory, in MiB."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
