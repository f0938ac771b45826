"""How far one of each carries: a formula for every hop, fitted, and held against two points it has not seen.

A process spends a + b·size CPU seconds on a fragment of `size` bytes. Alone on a core it carries
1/(a + b·size) fragments a second; `cores` that all of them share carry cores/Σ(a + b·size). The smaller of the two is predicted.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks import experience_path
from benchmarks.experience_path import PROCESSES
from benchmarks.services import services
from benchmarks.table import Cell, Options, Table
from benchmarks.transfer import Transfer
from penstock.wire.limits import KIB, MIB

FITTED: Final = (16 * KIB, 256 * KIB, MIB)
HELD_OUT: Final = (64 * KIB, 512 * KIB)
WITHIN: Final = 0.15
BYTES: Final = 192 * MIB
MOST_FRAGMENTS: Final = 6_000
COLUMNS: Final = (
    "process",
    "a, CPU µs per fragment",
    "b, CPU s per GB",
    *(f"fragments/s at {size // KIB} KiB" for size in HELD_OUT),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds that a process spends: `per_fragment` (a) and `per_byte` (b)."""

    per_fragment: float
    per_byte: float

    def of(self, size: float) -> float:
        """Of a fragment of `size` bytes."""
        return self.per_fragment + self.per_byte * size


def fit(seconds: Mapping[int, float]) -> Cost:
    """From CPU seconds per fragment by size; what is relative is made small, so that no size rules.

    Neither part is below 0.
    """
    sizes = np.array(list(seconds), float)
    measured = np.array(list(seconds.values()))
    columns = np.stack([np.ones_like(sizes), sizes], 1) / measured[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
    if fixed < 0:
        return Cost(0.0, float((measured / sizes).mean()))
    return Cost(float(fixed), max(0.0, float(slope)))


def carried(costs: Mapping[str, Cost], size: float, cores: int) -> float:
    """Fragments per second that all processes together carry on `cores`."""
    each = [cost.of(size) for cost in costs.values()]
    return 1.0 / max(*each, sum(each) / cores)


def table(options: Options) -> Table:
    """The two numbers of every hop, what it carries alone on a core, and prediction beside measurement."""
    runs: dict[int, list[Transfer]] = {size: [] for size in (*FITTED, *HELD_OUT)}
    for _ in range(options.repeat):
        for size, done in runs.items():
            done.append(_measure(size))
    costs = {process: fit({size: _spent(runs[size], process) for size in FITTED}) for process in PROCESSES}
    rows: list[Sequence[Cell]] = [
        (process, cost.per_fragment * 1e6, cost.per_byte * 1e9, *(1 / cost.of(size) for size in HELD_OUT))
        for process, cost in costs.items()
    ]
    cores = os.cpu_count() or 1
    predicted = [carried(costs, size, cores) for size in HELD_OUT]
    measured = [statistics.median(run.entries_per_second for run in runs[size]) for size in HELD_OUT]
    rows.append((f"all on {cores} cores, predicted", None, None, *predicted))
    rows.append((f"all on {cores} cores, measured", None, None, *measured))
    rows.append(("measured / predicted", None, None, *np.divide(measured, predicted).tolist()))
    return Table(
        title=f"CPU seconds of a fragment: a + b·size, fitted at {', '.join(f'{size // KIB} KiB' for size in FITTED)}",
        columns=COLUMNS,
        rows=rows,
        note=f"wanted: measured within {WITHIN:.0%} of predicted; `python -m benchmarks.curves` draws what they mean for many actors",
    )


def _measure(size: int) -> Transfer:
    with services(durability="memory") as here:
        return experience_path.measure(here, count=min(MOST_FRAGMENTS, BYTES // size), size=size)


def _spent(runs: Sequence[Transfer], process: str) -> float:
    """CPU seconds per fragment."""
    return statistics.median(
        run.cpu_seconds_per_gb[process] * run.megabytes_per_second / 1e3 / run.entries_per_second
        for run in runs
    )
