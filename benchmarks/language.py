"""The learner's update of a language model beside a bare loop over transformers and peft, and their memory.

Each way runs in a process of its own, in turn, on one thread. A sampled token counts once per update, for any
number of epochs; settings are the algorithm's own. Memory is the peak that the process has had resident, less
what it had before the model was read.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any, Final

from benchmarks.table import Cell, Options, Table
from penstock.wire.limits import MIB

WAYS: Final = ("bare-lora", "lora", "bare-full", "full")
SECONDS: Final = {"tiny": 5.0, "small": 0.0}
"""CPU seconds of a measurement, behind two updates to get warm and one."""
AIM: Final = 1.0
MEMORY_AIM: Final = 0.6


def table(options: Options) -> Table:
    """Return the rows of both shapes; ratios are taken within a round, and the median shown."""
    rows: list[tuple[Cell, ...]] = []
    for shape in SECONDS:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            _child("make", shape, folder)
            rounds = [{way: _measured(way, shape, folder) for way in WAYS} for _ in range(options.repeat)]
        rows += [_row(way, shape, rounds) for way in WAYS]
    return Table(
        title="updates of a language model: 16 tokens of prompt, 32 of response, one thread",
        columns=("what", "million parameters", "tokens per CPU second", "of the bare loop", "MiB", "of full"),
        rows=rows,
        note=f"aims: rate {AIM} of the bare loop; LoRA at most {MEMORY_AIM} of the memory of all weights",
    )


def _row(way: str, shape: str, rounds: list[dict[str, dict[str, Any]]]) -> tuple[Cell, ...]:
    kind = way.removeprefix("bare-")
    full = way.replace(kind, "full")
    return (
        f"{shape}, {way}",
        rounds[0]["full"]["parameters"] / 1e6,
        statistics.median(one[way]["tokens_per_s"] for one in rounds),
        statistics.median(one[way]["tokens_per_s"] / one[f"bare-{kind}"]["tokens_per_s"] for one in rounds),
        statistics.median(_taken(one[way]) / MIB for one in rounds),
        statistics.median(_taken(one[way]) / _taken(one[full]) for one in rounds),
    )


def _taken(measured: dict[str, Any]) -> int:
    taken: int = measured["peak"] - measured["start"]
    return taken


def _measured(way: str, shape: str, folder: str) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads(_child(way, shape, folder, str(SECONDS[shape])).splitlines()[-1])
    return measured


def _child(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.language_update", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
