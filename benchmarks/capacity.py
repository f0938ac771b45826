"""The capacity of one process of each kind: a formula for every hop, fitted, and compared with unseen points.

A process spends a + b·size CPU seconds on a fragment of `size` bytes. One actor has one Append under way:
sender, broker and Redis work for it one after another and the reader beside them, so it moves 1/(their sum)
fragments a second. Of many, a process alone on a core carries 1/(a + b·size), and `cores` that all of them
share carry cores/Σ(a + b·size), whichever is less.
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
SENDERS: Final = 4
"""Number of actors that counts as many: while one waits for its acknowledgement others are served."""
BYTES: Final = 192 * MIB
MOST_FRAGMENTS: Final = 6_000
IN_SERIES: Final = ("sender", "broker", "Redis")
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
        """Return the CPU seconds of a fragment of `size` bytes."""
        return self.per_fragment + self.per_byte * size


def fit(seconds: Mapping[int, float]) -> Cost:
    """Fit the cost to CPU seconds per fragment by size.

    It minimises relative errors, so that no size dominates. Neither part is below 0.
    """
    sizes = np.array(list(seconds), float)
    measured = np.array(list(seconds.values()))
    columns = np.stack([np.ones_like(sizes), sizes], 1) / measured[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
    if fixed < 0:
        return Cost(0.0, float((measured / sizes).mean()))
    return Cost(float(fixed), max(0.0, float(slope)))


def moved_by_one(costs: Mapping[str, Cost], size: float) -> float:
    """Return the fragments per second of one actor, whose next Append waits for the one before."""
    return 1.0 / sum(costs[hop].of(size) for hop in IN_SERIES)


def carried(costs: Mapping[str, Cost], size: float, cores: float) -> float:
    """Return the fragments per second that all processes together carry on `cores`."""
    each = [cost.of(size) for cost in costs.values()]
    return 1.0 / max(*each, sum(each) / cores)


def table(options: Options) -> Table:
    """Return the two numbers of every hop, its capacity alone on a core, and predictions.

    Predictions stand beside measurements.
    """
    points = [(size, 1) for size in (*FITTED, *HELD_OUT)] + [(size, SENDERS) for size in HELD_OUT]
    runs: dict[tuple[int, int], list[Transfer]] = {point: [] for point in points}
    for _ in range(options.repeat):
        for (size, senders), done in runs.items():
            done.append(_measure(size, senders))
    costs = {process: fit({size: _spent(runs[size, 1], process) for size in FITTED}) for process in PROCESSES}
    rows: list[Sequence[Cell]] = [
        (process, cost.per_fragment * 1e6, cost.per_byte * 1e9, *(1 / cost.of(size) for size in HELD_OUT))
        for process, cost in costs.items()
    ]
    cores = os.cpu_count() or 1
    one = [moved_by_one(costs, size) for size in HELD_OUT]
    many = [carried(costs, size, cores) for size in HELD_OUT]
    rows += _compared("one actor", one, [_rate(runs[size, 1]) for size in HELD_OUT])
    rows += _compared(
        f"{SENDERS} actors on {cores} cores", many, [_rate(runs[size, SENDERS]) for size in HELD_OUT]
    )
    return Table(
        title=(
            "CPU seconds of a fragment: a + b·size, fitted at "
            f"{', '.join(f'{size // KIB} KiB' for size in FITTED)}"
        ),
        columns=COLUMNS,
        rows=rows,
        note=f"wanted: one actor within {WITHIN:.0%} of predicted; many reach it where cores are whole. "
        "`python -m benchmarks.curves` draws what this means for many actors",
    )


def _compared(what: str, predicted: Sequence[float], measured: Sequence[float]) -> list[Sequence[Cell]]:
    return [
        (f"{what}, predicted", None, None, *predicted),
        (f"{what}, measured", None, None, *measured),
        (f"{what}, measured / predicted", None, None, *np.divide(measured, predicted).tolist()),
    ]


def _rate(runs: Sequence[Transfer]) -> float:
    return statistics.median(run.entries_per_second for run in runs)


def _measure(size: int, senders: int) -> Transfer:
    with services(durability="memory") as here:
        count = min(MOST_FRAGMENTS, BYTES // size)
        return experience_path.measure(here, count=count, size=size, senders=senders)


def _spent(runs: Sequence[Transfer], process: str) -> float:
    """Return the CPU seconds per fragment."""
    return statistics.median(
        run.cpu_seconds_per_gb[process] * run.megabytes_per_second / 1e3 / run.entries_per_second
        for run in runs
    )
