"""What conditions came to: a table with verdicts, accuracy over levels and curves per seed, as files.

OUT/table.md            the table, and each gate with what was found
OUT/results.json        all of it as JSON values
OUT/levels.png          accuracy over levels, by condition
OUT/curves.png          gain over updates of the runs, by seed
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from workloads.thoughts.commands.condition_gates import Gate, Results, gates

_OVER: Final = 10
"""Updates whose mean a curve shows: single batches vary by more than what is compared."""
_RUNS: Final = {5: "REINFORCE", 7: "another's reward"}


def write_results(results: Results, names: Mapping[int, str], out: Path) -> list[str]:
    """Write all files and return the lines of the table."""
    found = gates(results)
    lines = [*table(results, names), "", *gates_table(found)]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    said = {"seeds": results, "gates": [asdict(gate) for gate in found]}
    (out / "results.json").write_text(json.dumps(said) + "\n")
    _draw_levels(results, names, out / "levels.png")
    _draw_curves(results, out)
    return lines


def table(results: Results, names: Mapping[int, str]) -> list[str]:
    """Return the table of all conditions, a column a seed within each cell."""
    lines = [
        "| condition | right | right, likeliest thoughts | gain, nats | legal chains | coherence | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for number in sorted({number for found in results.values() for number in found}):
        rows = [found[number] for found in results.values() if number in found]
        shown = [one["validation"] for one in rows]
        is_direct = number in (1, 2)
        cells = [
            f"{number} {names[number]}",
            _each(one["accuracy"] for one in rows),
            _each(one["greedy"] for one in rows),
            "–" if is_direct else _each(one["gain"] for one in shown),
            "–" if is_direct else _each(one["chains"] for one in shown),
            "–" if is_direct else _each(one["coherence"] for one in shown),
            "–" if is_direct else ", ".join(one["verdict"] for one in shown),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def gates_table(found: Sequence[Gate]) -> list[str]:
    """Return a table of gates: what must hold, what was found, and whether it holds."""
    lines = ["| seed | what must hold | bound | found | holds |", "|---|---|---|---|---|"]
    return lines + [
        f"| {one.seed} | {one.name} | {one.bound} | {one.found} | {'yes' if one.holds else 'no'} |"
        for one in found
    ]


def _each(numbers: Any) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def _draw_levels(results: Results, names: Mapping[int, str], file: Path) -> None:
    figure, axes = _axes()
    for number in sorted({number for found in results.values() for number in found}):
        rows = [found[number]["by_level"] for found in results.values() if number in found]
        levels = sorted(rows[0], key=int)
        means = [float(np.mean([row[level] for row in rows])) for level in levels]
        axes.plot([int(level) for level in levels], means, marker="o", label=f"{number} {names[number]}")
    axes.set(xlabel="level", ylabel="answers right", ylim=(0, 1.02))
    _save(figure, axes, file)


def _draw_curves(results: Results, out: Path) -> None:
    curves = [
        (f"{name}, seed {seed}", read_curve(out / f"seed-{seed}" / f"run-{number}" / "metrics.jsonl"))
        for seed in results
        for number, name in _RUNS.items()
    ]
    draw_lines(curves, "gain of a thought, nats", out / "curves.png")


def draw_lines(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]], quantity: str, file: Path
) -> None:
    """Draw named curves over updates as a picture, each a running mean; one without a point is left out.

    Curves of one name have one colour, and are named once.
    """
    figure, axes = _axes()
    colours: dict[str, Any] = {}
    for name, rows in curves:
        if rows:
            said = {"color": colours[name]} if name in colours else {"label": name}
            (line,) = axes.plot(*zip(*running_mean(rows), strict=True), alpha=0.7, **said)
            colours[name] = line.get_color()
    axes.set(xlabel=f"updates (each point is the mean of {_OVER})", ylabel=quantity)
    _save(figure, axes, file)


def running_mean(rows: Sequence[tuple[float, float]], over: int = _OVER) -> Sequence[tuple[float, float]]:
    """Return places with the mean of their figure and of those before it, `over` of them where there are."""
    values = np.array([value for _, value in rows])
    return [
        (place, float(values[max(0, number + 1 - over) : number + 1].mean()))
        for number, (place, _) in enumerate(rows)
    ]


def read_curve(file: Path, name: str = "gain") -> Sequence[tuple[float, float]]:
    """Return updates and a figure of each line of a run's `metrics.jsonl` that has it; () without a file."""
    if not file.exists():
        return ()
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return [(row["updates"], row[name]) for row in rows if name in row]


def _axes() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, axes: Any, file: Path) -> None:
    if axes.lines:
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)
