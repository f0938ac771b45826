"""A gateway with many people: 100 requests a second, with and without 1,000 event streams that say little.

Beside it bare FastAPI that echoes a constant, asked at the same rate by the same client in the same run. Of
four requests one reads who calls, one the jobs, one the feedback, and one stores a rating; four programs call
in turn, since an account may call 100 times a second. A stream is that of a console that looks at the jobs.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.child import child
from benchmarks.prompts_http import bare_fastapi, resident_mib
from benchmarks.table import Cell, Options, Table
from launch.run.child_process import penstock
from penstock.runtime.health import read_endpoint

RATE: Final = 100.0
STREAMS: Final = 1000
PROGRAMS: Final = 4
AIM: Final = "p99 below 50 ms, memory flat"
PASSWORD: Final = "correct horse battery"  # noqa: S105 - of an account that lives for one measurement
_FEEDBACK: Final = "/api/projects/alpha/agents/my_agent/feedback"
_PATIENCE_S: Final = 180.0


def table(options: Options) -> Table:
    """Return the rows; each figure is the median over the rounds. options.seconds: of each measurement."""
    with gateway() as (address, pid, tokens), bare_fastapi() as (bare, _):
        asked, echo = _asked(tokens), {"requests": [["POST", "/select_action", _JSON, '{"embedding": "x"}']]}
        found: dict[str, list[dict[str, float]]] = {"bare": [], "alone": [], "streams": []}
        for _ in range(options.repeat):
            found["bare"].append(_measured(bare, echo, 0, options.seconds, None))
            found["alone"].append(_measured(address, asked, 0, options.seconds, pid))
            found["streams"].append(_measured(address, asked, STREAMS, options.seconds, pid))
    names = {
        "bare": "bare FastAPI, echo",
        "alone": "gateway",
        "streams": f"gateway, {STREAMS:,} event streams beside it",
    }
    rows: list[list[Cell]] = [
        [title, *(_median(found[key], name) for name in ("calls", "p50_ms", "p99_ms", "before", "after"))]
        for key, title in names.items()
    ]
    return Table(
        title=f"{RATE:g} requests a second to a gateway, SQLite",
        columns=("", "requests", "p50 ms", "p99 ms", "MiB before", "MiB after"),
        rows=rows,
        note=f"aim: {AIM}. A latency counts from the time at which a request was due.",
    )


_JSON: Final = {"Content-Type": "application/json"}


def _asked(tokens: list[str]) -> dict[str, Any]:
    """Return what is asked for, as `people_load` takes it."""
    requests = []
    rating = json.dumps({"prompt": "What is 2 + 2?", "response": "4", "score": 0.9})
    for token in tokens:
        who = {"Authorization": f"Bearer {token}"}
        requests += [
            ("GET", "/api/me", who, ""),
            ("GET", "/api/projects/alpha/jobs", who, ""),
            ("GET", f"{_FEEDBACK}?limit=10", who, ""),
            ("POST", "/api/policies/feedback/my_agent", who | _JSON, rating),
        ]
    path = "/api/projects/alpha/events?job="
    streams = [(path, {"Authorization": f"Bearer {token}"}) for token in tokens]
    return {"requests": requests, "streams": streams}


def _measured(
    address: str, asked: dict[str, Any], streams: int, seconds: float, pid: int | None
) -> dict[str, float]:
    """Return the figures of the client, and MiB of the process before and after it."""
    words = (address, "--rate", str(RATE), "--seconds", str(seconds), "--streams", str(streams))
    with child(["-m", "benchmarks.people_load", *words], pipes=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps(asked) + "\n")
        client.stdin.flush()
        if not client.stdout.readline():
            raise RuntimeError(f"the client of {address} failed")
        before = {} if pid is None else {"before": resident_mib(pid)}
        client.stdin.write("\n")
        client.stdin.flush()
        told = client.stdout.readline()
        if not told:
            raise RuntimeError(f"the client of {address} failed")
        after = {} if pid is None else {"after": resident_mib(pid)}
        client.stdin.close()
    return dict(json.loads(told)) | before | after


def _median(rounds: list[dict[str, float]], name: str) -> float | None:
    return statistics.median(one[name] for one in rounds) if name in rounds[0] else None


@contextmanager
def gateway() -> Iterator[tuple[str, int, list[str]]]:
    """Start a gateway on files of its own; yields its address, its process, and the tokens of programs."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        _operator(folder, "user", "add", "ada", "--project", "alpha", said=f"{PASSWORD}\n")
        tokens = [
            _operator(folder, "token", "add", f"p{number}", "--project", "alpha", "--role", "editor").split()[
                -1
            ]
            for number in range(PROGRAMS)
        ]
        endpoints = folder / "gateway.json"
        words = ("gateway", "--listen", "127.0.0.1:0", "--endpoints", str(endpoints))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(penstock(*words), stdout=log, stderr=log, cwd=folder)
        try:
            until_s = time.monotonic() + _PATIENCE_S
            while (found := read_endpoint(endpoints)) is None:
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"the gateway does not come up: {(folder / 'log').read_text()}")
                time.sleep(0.1)
            yield str(found.address), process.pid, tokens
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)


def _operator(folder: Path, *words: str, said: str = "") -> str:
    """Return what a command of the operator prints."""
    return subprocess.run(
        penstock("gateway", *words), cwd=folder, input=said, capture_output=True, text=True, check=True
    ).stdout
