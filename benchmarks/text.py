"""Tokens of an engine that answers 1, 8 and 32 streams at a time, beside `generate` of transformers."""

import json
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any, Final

from benchmarks.table import Cell, Options, Table
from benchmarks.text_engine import MANY, STREAMS, VERSIONS
from penstock.wire.limits import MIB

AIM: Final = 4.0
"""Of 8 streams, over one."""
WAYS: Final = {
    "bare": "transformers.generate, one after the other",
    **{str(streams): str(streams) for streams in STREAMS},
    "versions": f"8, of {VERSIONS} versions",
}


def table(options: Options) -> Table:
    """Return the rows; ratios are taken within a round, and the median shown."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        _child("benchmarks.language_update", "make", "small", folder)
        rounds = [json.loads(_child("benchmarks.text_engine", folder)) for _ in range(options.repeat)]
    load_ms, memory = (median(one[name] for one in rounds) for name in ("load_ms", "memory_per_adapter"))
    return Table(
        title="answers of a language model: 16 tokens of prompt, 32 of response, one thread",
        columns=("streams", "tokens per CPU second", "of one stream", "of bare", "CPU ms to the first token"),
        rows=[_row(way, rounds) for way in WAYS],
        note=f"aim: 8 streams {AIM:g} × one; adapters of {rounds[0]['adapter_bytes'] / MIB:.1f} MiB load "
        f"in {load_ms:.0f} CPU ms and take {memory / MIB:.1f} MiB each, where {MANY} share one base",
    )


def _row(way: str, rounds: list[dict[str, Any]]) -> tuple[Cell, ...]:
    def rates(name: str) -> list[float]:
        return [one["ways"][name]["tokens_per_s"] for one in rounds]

    own = rates(way)
    return (
        WAYS[way],
        median(own),
        median(rate / one for rate, one in zip(own, rates("1"), strict=True)),
        median(rate / bare for rate, bare in zip(own, rates("bare"), strict=True)),
        median(one["ways"][way]["first_ms"] for one in rounds),
    )


def _child(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
