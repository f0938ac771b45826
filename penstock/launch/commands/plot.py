"""Runs as PNG: return, rate and staleness over environment steps, several runs in the same axes."""

import itertools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.config.run_folder import CONFIG_FILE
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.launch.inspection.curve import Curve, Point, rates, shown
from penstock.launch.inspection.processes import METRICS_FILE, is_going_on
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.foreground import Runs, finite
from penstock.runtime.output_file import output_file

_WIDTH_INCHES: Final = 9.0
_HEIGHT_INCHES: Final = 8.5
_LEGEND_LINE_INCHES: Final = 0.26
_DPI: Final = 120
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f6000", "#444444")
"""Colours that can be distinguished with any kind of colour vision (Okabe and Ito), on white."""
_DASHES: Final = ("-", "--", ":", "-.")
_SMOOTHED: Final = 60
"""Number of stretches of a run over which a rate is a mean."""

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class _Panel:
    label: str
    values: Callable[[Sequence[Point]], Values]
    from_zero: bool


def plot(
    runs: Runs,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="PNG file; default: learning-curve.png in the run's folder, or here for several.",
        ),
    ] = None,
) -> int:
    """Draw return, rate and staleness of runs over environment steps into one picture."""
    single = runs[0] if len(runs) == 1 else Path()
    target = output or single / "learning-curve.png"
    draw(runs, target)
    sys.stdout.write(f"{target}\n")
    return EXIT_OK


def draw(runs: Sequence[Path], output: Path) -> None:
    """Draw `runs` into one picture, of the format of the suffix of `output`, else PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = [(_label(run), _curve(run).poll()) for run in runs]
    legend_inches = _LEGEND_LINE_INCHES * len(curves)
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES + legend_inches), dpi=_DPI, layout="constrained")
    kind, known = (
        output.suffix.removeprefix(".").lower() or "png",
        FigureCanvasAgg(figure).get_supported_filetypes(),
    )
    if kind not in known:
        raise ConfigurationError(f"--output {output}: ends with no kind of picture; use {', '.join(known)}")
    panels = figure.subplots(len(_PANELS), sharex=True, height_ratios=(2, 1, 1))
    for axes, panel in zip(panels, _PANELS, strict=True):
        _draw_panel(axes, panel, curves)
    panels[-1].set_xlabel("environment steps")
    panels[-1].xaxis.set_major_formatter(_thousands)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", frameon=False)
    with output_file(output, "wb") as file:
        figure.savefig(file, format=kind)


def _draw_panel(axes: Any, panel: _Panel, curves: Sequence[tuple[str, Sequence[Point]]]) -> None:
    styles = itertools.cycle(itertools.product(_DASHES, _COLOURS))
    for (label, points), (dash, colour) in zip(curves, styles, strict=False):
        known = zip(points, panel.values(points), strict=True)
        found = [(point.env_steps, value) for point, value in known if value is not None]
        steps, values = [step for step, _ in found], [value for _, value in found]
        axes.plot(steps, values, linewidth=1.6, color=colour, linestyle=dash, label=label)
        # Where a run ends: one that is shorter than the others has not failed.
        axes.plot(steps[-1:], values[-1:], marker="o", markersize=5, color=colour)
    axes.set_ylabel(panel.label)
    axes.yaxis.set_major_formatter(_thousands)
    axes.grid(alpha=0.25)
    axes.margins(x=0.02)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if not any(points for _, points in curves):
        axes.text(0.5, 0.5, "nothing learned yet", transform=axes.transAxes, ha="center", color="#666666")


def _smooth_rates(points: Sequence[Point]) -> list[float | None]:
    """Return rates over stretches: over a line of `metrics.jsonl`, a quarter of a second, they are noise."""
    stretch = max(1, len(points) // _SMOOTHED)
    chosen = dict(zip(range(0, len(points), stretch), rates(points[::stretch]), strict=True))
    return [chosen.get(index) for index in range(len(points))]


def _curve(run: Path) -> Curve:
    file = run / METRICS_FILE
    if not file.exists():
        raise ConfigurationError(f"{run}: holds no {METRICS_FILE}, so no run; see `ls runs`")
    return Curve(file)


def _label(run: Path) -> str:
    config = run / CONFIG_FILE
    settings: Settings | None = load([parse_toml(config)]) if config.exists() else None
    return f"{settings.environment.id}, seed {settings.seed} ({settings.run})" if settings else run.name


def _thousands(value: float, _position: int) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}"


_PANELS: Final = (
    _Panel(
        "return,\nmean of 100 training episodes", lambda points: [one.mean_return for one in points], False
    ),
    _Panel("environment steps\nper second", _smooth_rates, True),
    _Panel("staleness,\nmedian, in updates", lambda points: [one.staleness for one in points], True),
)


# ---- `penstock graph RUN`: the learning curve as text, again and again while the run goes on.

_BLANK: Final = 0x2800
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a Braille pattern, by row and column."""
_LABEL: Final = 10
_FEWEST_COLUMNS: Final = 24
_ROWS: Final = 16
_HOME: Final = "\x1b[H\x1b[J"


def graph(
    run: Annotated[Path, typer.Argument(help="Folder of a run, running or ended.")],
    once: Annotated[bool, typer.Option("--once", help="Draw once and stop.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600, callback=finite, help="Seconds between two pictures.")
    ] = 1.0,
) -> int:
    """Draw the learning curve of a run in the terminal, until it ends."""
    curve = _curve(run)
    follows = not once and sys.stdout.isatty()
    while True:
        goes_on = follows and is_going_on(run)
        size = shutil.get_terminal_size()
        picture = drawn(curve.poll(), size.columns, min(_ROWS, max(size.lines - 5, 4)))
        sys.stdout.write(f"{_HOME if follows else ''}{run.name}\n{picture}\n")
        sys.stdout.flush()
        if not goes_on:
            return EXIT_OK
        time.sleep(interval)


def drawn(points: Sequence[Point], columns: int, rows: int) -> str:
    """Return mean return over environment steps as text. rows: without the two lines below."""
    known = [(one.env_steps, one.mean_return) for one in points if one.mean_return is not None]
    if not known:
        return "nothing learned yet"
    last, value = known[-1]
    caption = f"mean return {shown(value)} of the last 100 training episodes, after {last:,} steps"
    return "\n".join([*_plot(known, max(columns, _FEWEST_COLUMNS) - _LABEL - 1, rows), caption])


def _plot(known: Sequence[tuple[int, float]], wide: int, tall: int) -> list[str]:
    low, high = min(value for _, value in known), max(value for _, value in known)
    span, end = (high - low) or 1.0, known[-1][0] or 1
    cells = [[_BLANK] * wide for _ in range(tall)]
    placed = [
        (round(step / end * (2 * wide - 1)), round((high - value) / span * (4 * tall - 1)))
        for step, value in known
    ]
    for before, after in zip(placed[:1] + placed, placed, strict=False):
        for x, y in _between(before, after):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    labels = {0: shown(high), tall - 1: shown(low)}
    lines = [
        f"{labels.get(row, ''):>{_LABEL}}┤{''.join(map(chr, cell))}".rstrip(chr(_BLANK))
        for row, cell in enumerate(cells)
    ]
    return [*lines, f"{'':>{_LABEL}}└0{f'{end:,} steps':>{wide - 1}}"]


def _between(before: tuple[int, int], after: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Return the dots of a straight line between two dots, including both."""
    steps = max(abs(after[0] - before[0]), abs(after[1] - before[1]), 1)
    (x, y), (to_x, to_y) = before, after
    return [
        (round(x + (to_x - x) * step / steps), round(y + (to_y - y) * step / steps))
        for step in range(steps + 1)
    ]
