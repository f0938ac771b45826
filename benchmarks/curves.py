"""Pictures of the results of `make bench`: `python -m benchmarks.curves bench.json docs/images`.

The file is that of `--json` with the parts `scaling` and `capacity`; a part that it lacks is not drawn.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.capacity import Cost
from penstock.wire.limits import KIB

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
"""Colours that people with any kind of colour vision can tell apart (Okabe and Ito), on white."""
SIZE: Final = 64 * KIB
RATES: Final = (0.2, 1.0, 5.0)
"""Fragments per second of one actor."""
ACTORS: Final = np.geomspace(10, 10_000, 200)
HOPS: Final = ("broker", "Redis", "reader")
"""Hops that all actors share."""


def draw(tables: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the pictures and return their files."""
    drawn = []
    if "scaling" in tables:
        drawn.append(scaling(tables["scaling"]["rows"], folder / "scaling.png"))
    if "capacity" in tables:
        drawn.append(capacity(tables["capacity"]["rows"], folder / "capacity.png"))
    return drawn


def scaling(rows: Sequence[Sequence[Any]], file: Path) -> Path:
    """Draw throughput above, CPU seconds by process below, a column for each varied quantity."""
    turned = list(dict.fromkeys(row[0] for row in rows))
    figure = Figure(figsize=(4.2 * len(turned), 7), dpi=110, layout="constrained")
    above, below = figure.subplots(2, len(turned), squeeze=False)
    for name, upper, lower in zip(turned, above, below, strict=True):
        _column([row for row in rows if row[0] == name], upper, lower)
    figure.savefig(file)
    return file


def _column(rows: Sequence[Sequence[Any]], upper: Axes, lower: Axes) -> None:
    name, _, _, unit, per, _, _ = rows[0]
    throughput = {row[1]: row[2] for row in rows}
    upper.plot(list(throughput), list(throughput.values()), marker="o", color=COLOURS[0])
    upper.set_ylabel(unit)
    for process, colour in zip(dict.fromkeys(row[5] for row in rows), COLOURS, strict=False):
        points = {row[1]: row[6] for row in rows if row[5] == process}
        lower.plot(list(points), list(points.values()), marker="o", color=colour, label=process)
    lower.set_ylabel(f"CPU seconds per {per}")
    lower.set_xlabel(name)
    lower.legend(frameon=False)
    for axes in (upper, lower):
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def capacity(rows: Sequence[Sequence[Any]], file: Path) -> Path:
    """Draw the cores that each shared hop needs, by number of actors.

    There are three rates of fragments of 64 KiB.
    """
    costs = {row[0]: Cost(row[1] / 1e6, row[2] / 1e9) for row in rows if row[0] in HOPS}
    figure = Figure(figsize=(4.2 * len(RATES), 4), dpi=110, layout="constrained")
    for rate, axes in zip(RATES, figure.subplots(1, len(RATES), squeeze=False)[0], strict=True):
        for (hop, cost), colour in zip(costs.items(), COLOURS, strict=False):
            axes.plot(ACTORS, ACTORS * rate * cost.of(SIZE), color=colour, label=hop)
        axes.axhline(1.0, color="#444444", linewidth=1, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="actors", title=f"{rate:g} fragments of 64 KiB/s each")
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("cores needed; dotted: all of one")
    figure.axes[0].legend(frameon=False)
    figure.savefig(file)
    return file


def main() -> None:
    """Draw the contents of a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("tables", type=Path, help="written by `python -m benchmarks --json`")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    said = parser.parse_args()
    for file in draw(json.loads(said.tables.read_text()), said.folder):
        print(file)


if __name__ == "__main__":
    main()
