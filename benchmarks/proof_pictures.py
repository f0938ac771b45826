"""The learning curves of the proofs as one picture: a panel per entry, a line per seed."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.proof_records import Record
from benchmarks.proofs import Proof

COLUMNS = 4


def curves(panels: Sequence[tuple[Proof, Sequence[Record]]], path: Path) -> None:
    """Draw the mean return of the last 100 training episodes against environment steps.

    The threshold is dashed.

    panels: the first proof of each entry, with the records of its seeds.
    """
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(3.2 * COLUMNS, 2.3 * rows), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for axis, (proof, records) in zip(axes, panels, strict=False):
        for record in records:
            axis.plot(*zip(*record.curve, strict=True), linewidth=1)
        bound = proof.threshold if proof.at_most is None else proof.at_most
        axis.axhline(bound, color="black", linestyle="--", linewidth=0.8)
        axis.set_title(f"{proof.title}, {proof.algorithm}", fontsize="small")
        axis.tick_params(labelsize="small")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
        axis.grid(alpha=0.3)
    for axis in list(figure.axes)[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("environment steps")
    figure.supylabel("mean return of 100 training episodes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
