"""The policy server beside a bare gRPC echo of the same message sizes, which is the limit; in turn, medians.

Both are grpc.aio in one process; the client is another process, with so many calls in flight. `cpu` is what
the server's process spends on a call, which other work on the machine disturbs less than the clock. The first
row is what a forward pass costs in a server that does nothing else: more than in a loop, for the call around
it leaves the caches cold. Learning: every step belongs to an episode, carries the reward of the one before,
and goes to a learner's log (its own broker and Redis). Each alone: the same policy server, told that no two
requests share a forward pass. Starts: servers of a network that torch runs, of which none may take more cores
than `actor.threads` says.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.child import child
from benchmarks.experience_path import fetch
from benchmarks.fragments import RUN
from benchmarks.served_run import BY_TORCH, SHAPE, make_policy, make_run, specification
from benchmarks.services import services, start
from benchmarks.serving_load import ROWS
from benchmarks.table import Cell, Options, Table
from broker.log.learner_log import LearnerLog
from launch.run.child_process import ServiceProcess, penstock
from penstock.policy.weights import encode

Ask = Callable[..., dict[str, float]]
"""Measures, see `client`: what to ask, whom, how many calls in flight, over how many streams."""

SECONDS: Final = 1.2
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One kind of request, and the load it is compared with: both a server and a word of `serving_load`."""

    name: str
    what: tuple[str, str]
    limit: tuple[str, str]
    in_flight: int
    streams: int = 1
    rows: int = 1


ACT: Final = ("server", "act")
ALONE: Final = ("alone", "act")
MANY: Final = ("server", "act-rows")
LEARN: Final = ("learning", "learn")
STARTS: Final = ("start-1", "start-2", "start-3")
STREAM: Final = ("server", "act-stream")
STREAM_ALONE: Final = ("alone", "act-stream")
ECHO: Final = ("echo", "echo")
ECHO_STREAM: Final = ("echo", "echo-stream")
FORWARD: Final = ("echo", "echo-forward")
LOADS: Final = (
    Load(name="echo with a forward pass, 1 client", what=FORWARD, limit=ECHO, in_flight=1),
    Load(name="Act, 1 client", what=ACT, limit=ECHO, in_flight=1),
    Load(name="Act, 16 in flight", what=ACT, limit=ECHO, in_flight=16),
    Load(name="Act, 64 in flight", what=ACT, limit=ECHO, in_flight=64),
    Load(name="Act, 64 in flight, each alone ÷ Act", what=ALONE, limit=ACT, in_flight=64),
    Load(name="Act of 64 rows, 1 client ÷ Act", what=MANY, limit=ACT, in_flight=1, rows=ROWS),
    *(Load(name=f"Act, by torch, {start}", what=(start, "act"), limit=ECHO, in_flight=1) for start in STARTS),
    Load(name="stream, 1 in flight", what=STREAM, limit=ECHO_STREAM, in_flight=1),
    Load(name="stream, 64 in flight", what=STREAM, limit=ECHO_STREAM, in_flight=64),
    Load(name="16 streams, 64 in flight", what=STREAM, limit=ECHO_STREAM, in_flight=64, streams=16),
    Load(name="stream, 64 in flight, each alone ÷ stream", what=STREAM_ALONE, limit=STREAM, in_flight=64),
    Load(name="episodes with rewards, 1 client ÷ Act", what=LEARN, limit=ACT, in_flight=1),
    Load(name="episodes with rewards, 64 ÷ Act", what=LEARN, limit=ACT, in_flight=64),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one run: calls per second, latencies, and CPU seconds of the server per call."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_s: float


def table(options: Options) -> Table:
    """Return calls per second and latencies, and both as parts of the echo's in the same minute."""
    with servers() as addresses, client() as ask:
        rows = [_row(ask, load, addresses, options.repeat) for load in LOADS]
    forward_ms = _forward_s() * 1e3
    return Table(
        title="Policy server beside a bare grpc.aio echo (64-64 policy, unix socket)",
        columns=(
            "",
            "per s",
            "p50 ms",
            "p99 ms",
            "cpu µs",
            "limit per s",
            "limit p50 ms",
            "rate ÷ limit",
            "p50 − limit ms",
        ),
        rows=rows,
        note=f"a bare forward pass of one observation takes {forward_ms:.3f} ms; "
        "the limit is the echo, or what stands behind ÷; per s and rate ÷ limit count observations",
    )


def _row(ask: Ask, load: Load, addresses: dict[str, tuple[str, int]], repeat: int) -> list[Cell]:
    limits, ours = [], []
    for _ in range(repeat):
        limits.append(measure(ask, load.limit, load, addresses))
        ours.append(measure(ask, load.what, load, addresses))
    mine, limit = _median(ours), _median(limits)
    ratio = statistics.median(a.rate / b.rate for a, b in zip(ours, limits, strict=True))
    return [
        load.name,
        mine.rate * load.rows,
        mine.p50_ms,
        mine.p99_ms,
        mine.cpu_s * 1e6,
        limit.rate,
        limit.p50_ms,
        ratio * load.rows,
        mine.p50_ms - limit.p50_ms,
    ]


def _median(runs: list[Figures]) -> Figures:
    return Figures(
        *(
            statistics.median(getattr(run, name) for run in runs)
            for name in ("rate", "p50_ms", "p99_ms", "cpu_s")
        )
    )


def measure(ask: Ask, whom: tuple[str, str], load: Load, addresses: dict[str, tuple[str, int]]) -> Figures:
    """Measure one kind of call against its server."""
    (address, pid), what = addresses[whom[0]], whom[1]
    before = _cpu_s(pid)
    told = ask(what, address, load.in_flight, load.streams)
    return Figures(told["rate"], told["p50_ms"], told["p99_ms"], (_cpu_s(pid) - before) / told["calls"])


@contextmanager
def client() -> Iterator[Ask]:
    """Yield the client process, which makes one measurement after the other."""
    with child(["-m", "benchmarks.serving_load"], pipes=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        write, read = process.stdin, process.stdout

        def ask(what: str, address: str, in_flight: int, streams: int = 1) -> dict[str, float]:
            line = f"{what} {address} --in-flight {in_flight} --streams {streams} --seconds {SECONDS}\n"
            write.write(line)
            write.flush()
            told = read.readline()
            if not told:
                raise RuntimeError(f"the client failed: {line}")
            figures: dict[str, float] = json.loads(told)
            return figures

        yield ask
        write.close()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _forward_s() -> float:
    """Return the seconds of one observation, the quickest of many; torch would take longer."""
    policy, best = make_policy(), float("inf")
    observation = {"observation": np.zeros((1, 4), np.float32)}
    for _ in range(100):
        began = time.perf_counter()
        for _ in range(50):
            policy.act(observation)
        best = min(best, (time.perf_counter() - began) / 50)
    return best


@contextmanager
def learner(redis_url: str) -> Iterator[None]:
    """A run that takes all experience and learns nothing; its weights are those of the other servers."""
    log, stop = LearnerLog.connect(redis_url, wait_s=10.0), threading.Event()
    log.acquire(RUN, "bench", 600_000)
    log.start(specification().encode(), SHAPE.pacing(100_000))
    log.publish(encode(make_policy()), update=1, settled=0, scalars={})

    def read() -> None:
        position = 0
        while not stop.is_set():
            entries = log.read(position, 256, 50)
            if entries:
                position = entries[-1].number
                fetch(log, entries)
                log.settle(position)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        log.release()
        log.close()


@contextmanager
def servers() -> Iterator[dict[str, tuple[str, int]]]:
    """Address and pid of each server."""
    read_fd, write_fd = os.pipe()
    started: list[ServiceProcess] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        services(durability="fsync_1s") as here,
        learner(here.redis_url),
    ):
        root = Path(name)
        make_run(root / "run")
        make_run(root / "by-torch", BY_TORCH)
        echo = [sys.executable, "-m", "benchmarks.served_run", f"unix:{root}/echo.sock"]
        serve = penstock("serve", "--run", str(root / "run"), "--listen", f"unix:{root}/server.sock")
        alone = penstock(
            *("serve", "--run", str(root / "run"), "--listen", f"unix:{root}/alone.sock"),
            *("--set", "serving.max_batch_rows=1", "--set", "serving.max_wait_ms=0"),
        )
        learning = penstock("serve", "--broker", here.broker, "--listen", f"unix:{root}/learning.sock")
        commands = {"echo": echo, "server": serve, "alone": alone, "learning": learning}
        commands |= {
            start: penstock("serve", "--run", f"{root}/by-torch", "--listen", f"unix:{root}/{start}.sock")
            for start in STARTS
        }
        try:
            for role, command in commands.items():
                started.append(start(role, command, root, read_fd))
            yield {
                process.spec.name: (f"unix:{root}/{process.spec.name}.sock", process.pid)
                for process in started
            }
        finally:
            os.close(write_fd)
            for process in reversed(started):
                process.kill()
            os.close(read_fd)
