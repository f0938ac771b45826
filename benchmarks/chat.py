"""A chat that learns while people talk: how long they wait, what a rating costs, and what is held in memory.

Simulated people ask over HTTP, three times each, and rate every answer; the learner trains on it beside them.
Beside it the same model answers alone, without a server.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.chat_day import chatting
from benchmarks.prompts_http import resident_mib
from benchmarks.table import Cell, Options, Table
from benchmarks.transfer import cpu_seconds
from launch.inspection.processes import read_endpoints
from penstock.runtime.health import read_endpoint

AT_ONCE: Final = (1, 8)
CONVERSATIONS: Final = 150
"""Of each measurement, in which the learner makes some versions."""
_BARE: Final = 200


def table(options: Options) -> Table:
    """Return the rows. options.repeat: rounds, whose answers are taken together."""
    alone: list[dict[str, Any]] = []
    people: dict[int, list[dict[str, Any]]] = {count: [] for count in AT_ONCE}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        chatting(Path(name), 0, "algorithm.learning_rate=1e-6") as address,
    ):
        state = Path(name) / "state"
        _talk(address, 8, 30)  # answers that come first are slower
        for _ in range(options.repeat):
            alone.append(_bare(state / "run" / "base_model"))
            for count in AT_ONCE:
                people[count] += _talk(address, count, CONVERSATIONS)
        rows: list[Sequence[Cell]] = [
            ["the model alone", *_times([x for one in alone for x in one["first_s"]]),
             *_times([x for one in alone for x in one["whole_s"]]), None, None, None],
            *([f"{count} at once, training beside", *_of(people[count])] for count in AT_ONCE),
        ]  # fmt: skip
        note = f"{_memory(Path(name))}; {_cost(Path(name), address)}"
    return Table(
        title="a chat that learns: times in ms of wall clock",
        columns=(
            "",
            "first p50",
            "first p99",
            "whole p50",
            "whole p99",
            "thumb p50",
            "thumb p99",
            "versions",
        ),
        rows=rows,
        note=note,
    )


def _of(said: Sequence[dict[str, Any]]) -> list[Cell]:
    names = ("first_s", "whole_s", "rated_s")
    times = [cell for name in names for cell in _times([one[name] for one in said])]
    return [*times, len({one["version"] for one in said})]


def _times(seconds: Sequence[float]) -> list[Cell]:
    return [float(np.percentile(seconds, part) * 1000) for part in (50, 99)]


def _bare(model: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bare_chat", str(model), str(_BARE)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    return found


def _talk(address: str, at_once: int, conversations: int) -> list[dict[str, Any]]:
    command = [
        sys.executable, "-m", "benchmarks.chat_people", address, "--conversations", str(conversations),
        "--at-once", str(at_once), "--seed", str(at_once),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _memory(folder: Path) -> str:
    """Return what each process holds."""
    held = {"gateway": _gateway(folder), **_processes(folder)}
    return "MiB: " + ", ".join(f"{name} {resident_mib(pid):.0f}" for name, pid in held.items())


def _cost(folder: Path, address: str) -> str:
    """Return what a conversation with three answers, each rated, takes of the gateway and of the server."""
    count, own = 100, {"gateway": _gateway(folder)}
    own |= {name: pid for name, pid in _processes(folder).items() if name.startswith("server")}
    registry = folder / "state" / "run" / "registry.sqlite"
    before, size = {name: cpu_seconds(pid) for name, pid in own.items()}, registry.stat().st_size
    _talk(address, 1, count)
    spent = {name: (cpu_seconds(pid) - before[name]) / count * 1000 for name, pid in own.items()}
    told = ", ".join(f"{name} {ms:.0f}" for name, ms in spent.items())
    grown = (registry.stat().st_size - size) / (3 * count)
    return f"CPU ms of a conversation of three rated answers: {told}; a rating takes {grown:.0f} bytes"


def _gateway(folder: Path) -> int:
    found = read_endpoint(folder / "gateway.json")
    assert found is not None
    return found.pid


def _processes(folder: Path) -> dict[str, int]:
    found = read_endpoints(folder / "state" / "run")
    return {name: one.server_pid or one.pid for name, one in found.items()}
