"""The policy server beside FastAPI in front of a Stable-Baselines3 policy.

The same requests, in turn, medians.

Ours is asked by gRPC, theirs by HTTP with JSON over connections that stay open; both clients are one process
of asyncio. Without the peer's environment below `.venv-peers` (`make bench-peers`) there is nothing to
compare.
"""

import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.peers import ENVIRONMENTS, HERE
from benchmarks.serving import Ask, client, servers
from benchmarks.table import Cell, Options, Table

PYTHON: Final = ENVIRONMENTS / "stable-baselines3" / "bin" / "python"
CLIENTS: Final = (1, 16, 64)
START_TIMEOUT_S: Final = 120.0


def table(options: Options) -> Table:
    """Return answers per second and latencies of both, and ours ÷ theirs."""
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is not there: make bench-peers makes it")
    with servers() as ours, fastapi() as theirs, client() as ask:
        rows = [_row(ask, clients, ours["server"][0], theirs, options.repeat) for clients in CLIENTS]
    return Table(
        title="One observation a request: Act beside FastAPI + uvicorn + Stable-Baselines3",
        columns=(
            *("clients", "per s", "p50 ms", "p99 ms"),
            *("FastAPI per s", "FastAPI p50 ms", "FastAPI p99 ms", "ours ÷ theirs"),
        ),
        rows=rows,
        note="64-64 policy of CartPole's shapes; one process each",
    )


def _row(ask: Ask, clients: int, ours: str, theirs: str, repeat: int) -> list[Cell]:
    rounds = [(ask("act", ours, clients), ask("http", theirs, clients)) for _ in range(repeat)]
    figures = [
        statistics.median(pair[side][name] for pair in rounds)
        for side in (0, 1)
        for name in ("rate", "p50_ms", "p99_ms")
    ]
    return [clients, *figures, statistics.median(mine["rate"] / other["rate"] for mine, other in rounds)]


@contextmanager
def fastapi() -> Iterator[str]:
    """Yield the peer's HOST:PORT, once it listens; raises RuntimeError when it does not come up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([str(PYTHON), str(HERE / "fastapi_sb3.py"), str(port)])
    try:
        _wait(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"fastapi_sb3.py does not listen (exit code {process.poll()})")
