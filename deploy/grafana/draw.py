"""Pictures of the dashboards from the same queries, without a Grafana.

    python -m deploy.grafana.draw --port 9090 --minutes 10 --out docs/images

The pictures show what Grafana shows, as far as paper can: the same grid, curves, limits, units and legends.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from deploy.grafana import queries
from deploy.grafana.prometheus import Prometheus, Series
from deploy.grafana.queries import Panel

COLUMNS: Final = 24
WIDTH_IN, ROW_IN, TOP_IN = 18.0, 0.36, 0.6
DPI: Final = 75
POINTS: Final = 240
SCRAPES: Final = 4
"""Number of scrapes in a window, as in Grafana's own $__rate_interval."""
COLOURS: Final = {"green": "#3a9d5d", "orange": "#e8912d", "red": "#d64550", "blue": "#3274d9"}
_MOST_LEGENDS: Final = 8
_STYLE: Final[Any] = {
    "font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.edgecolor": "#9aa0a6", "lines.linewidth": 1.2, "legend.fontsize": 7, "figure.facecolor": "#f4f5f5",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The time and the run that are shown. Unix times in seconds; run: a regular expression."""

    prometheus: Prometheus
    began_s: float
    ended_s: float
    run: str = queries.ALL_RUNS
    scrape_s: float = 5.0

    @property
    def step_s(self) -> float:
        """Return the seconds between two points of a curve."""
        return max(self.scrape_s, (self.ended_s - self.began_s) / POINTS)

    def series(self, panel: Panel) -> list[tuple[str, Series]]:
        """Return legend and values of every curve."""
        window = f"{math.ceil(max(SCRAPES * self.scrape_s, self.step_s))}s"
        found: list[tuple[str, Series]] = []
        for query in panel.queries:
            asked = query.asked(run=self.run, window=window)
            series = self.prometheus.query_range(asked, self.began_s, self.ended_s, self.step_s)
            found += [(legend(query.legend, one["metric"]), one) for one in series]
        return found


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Return the legend as Grafana fills it in, but without the run: a picture shows one."""
    shown = {**labels, "run": ""}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: shown.get(match[1], ""), template).strip()


def formatter(unit: str) -> Callable[[float], str]:
    """Return a formatter for those of Grafana's units that the dashboards use.

    Units that are words stand beside the title.
    """
    if unit == "percentunit":
        return lambda value: f"{100 * value:.3g}%"
    if unit == "s":
        return _seconds
    if unit in ("bytes", "Bps"):
        suffix = "B/s" if unit == "Bps" else "B"
        return lambda value: f"{_scaled(value, 1024, ('', 'Ki', 'Mi', 'Gi', 'Ti'))}{suffix}"
    return lambda value: _scaled(value, 1000, ("", "k", "M", "G"))


def _suffix(unit: str) -> str:
    return unit.removeprefix("suffix:").strip() if unit.startswith("suffix:") else ""


def _seconds(value: float) -> str:
    for limit, factor, name in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "min")):
        if abs(value) < limit:
            return f"{value * factor:.3g} {name}" if value else "0"
    return f"{value / 3600:.3g} h"


def _scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    place = 0
    while abs(value) >= base and place < len(names) - 1:
        value, place = value / base, place + 1
    digits = 4 if abs(value) >= 1000 else 3
    return f"{value:.{digits}g} {names[place]}".rstrip()


def draw(file: Path, view: View) -> Figure:
    """Draw a dashboard as a picture."""
    panels = list(queries.panels(file))
    height = max(panel.place.get("y", 0) + panel.place["h"] for panel in panels)
    size = (WIDTH_IN, height * ROW_IN + TOP_IN)
    figure = Figure(figsize=size)
    figure.text(0.008, 1 - 0.3 / size[1], f"Penstock · {file.stem.capitalize()}", size=14, weight="bold")
    for title, row in queries.rows(file):
        place = 1 - (TOP_IN + (row + 0.75) * ROW_IN) / size[1]
        figure.text(0.008, place, f"▾ {title}", size=10, color="#464c54")
    for panel in panels:
        _panel(_axes(figure, panel, size), panel, view)
    return figure


def _axes(figure: Figure, panel: Panel, size: tuple[float, float]) -> Axes:
    """Return axes at the panel's place in the grid, less the room for its words."""
    place, column = panel.place, WIDTH_IN / COLUMNS
    room = (0.15, 0.15, 0.3, 0.1) if panel.kind == "stat" else (0.75, 0.78, 0.32, 0.2)
    left, bottom, top, right = room
    x, y = place.get("x", 0) * column + left, TOP_IN + place.get("y", 0) * ROW_IN + top
    width, height = place["w"] * column - left - right, place["h"] * ROW_IN - top - bottom
    return figure.add_axes((x / size[0], 1 - (y + height) / size[1], width / size[0], height / size[1]))


def _panel(axes: Axes, panel: Panel, view: View) -> None:
    axes.set_title(panel.title, y=1.02)
    if panel.kind != "stat":
        axes.set_title(_suffix(panel.unit), loc="right", y=1.02, size=7, weight="normal", color="#6b7280")
    found = view.series(panel)
    if not found:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#9aa0a6")
        axes.set_xticks([]), axes.set_yticks([])
        return
    if panel.kind == "heatmap":
        _heat(axes, view, found)
    elif panel.kind == "stat":
        _number(axes, panel, view, found)
    else:
        _lines(axes, panel, view, found)


def _points(series: Series, began_s: float) -> tuple[list[float], list[float]]:
    """Return minutes since the beginning, and values."""
    pairs = [(float(at), float(text)) for at, text in series["values"]]
    return [(at - began_s) / 60 for at, _ in pairs], [value for _, value in pairs]


def _number(axes: Axes, panel: Panel, view: View, found: list[tuple[str, Series]]) -> None:
    minutes, values = _points(found[0][1], view.began_s)
    last = values[-1]
    (colour,) = [colour for value, colour in panel.limits if value is None or last >= value][-1:]
    axes.plot(minutes, values, color=COLOURS[colour], alpha=0.5)
    axes.fill_between(minutes, values, min(values), color=COLOURS[colour], alpha=0.12)
    text = f"{formatter(panel.unit)(last)} {_suffix(panel.unit)}".strip()
    axes.text(
        0.5,
        0.5,
        text,
        transform=axes.transAxes,
        ha="center",
        va="center",
        size=17,
        weight="bold",
        color=COLOURS[colour],
    )
    axes.axis("off")


def _lines(axes: Axes, panel: Panel, view: View, found: list[tuple[str, Series]]) -> None:
    if panel.is_stacked:
        _stack(axes, view, found)
    else:
        for name, series in found:
            minutes, values = _points(series, view.began_s)
            axes.plot(minutes, values, label=name or None, marker="." if len(values) < 3 else None)
    _finish(axes, panel, view)
    low, high = axes.get_ylim()
    for value, colour in panel.limits[1:]:
        if value is not None and low <= value <= high:
            axes.axhline(value, color=COLOURS[colour], linestyle="--", linewidth=0.8)


def _stack(axes: Axes, view: View, found: list[tuple[str, Series]]) -> None:
    curves = [(name, dict(zip(*_points(series, view.began_s), strict=True))) for name, series in found]
    minutes = sorted({minute for _, curve in curves for minute in curve})
    heights = [[curve.get(minute, 0.0) for minute in minutes] for _, curve in curves]
    axes.stackplot(minutes, heights, labels=[name for name, _ in curves], alpha=0.7)


def _heat(axes: Axes, view: View, found: list[tuple[str, Series]]) -> None:
    """Draw a heat map.

    Buckets are cumulative, so a cell is the difference of its bucket and the one below.
    """
    buckets = sorted(found, key=lambda one: float(one[0]))
    curves = [dict(zip(*_points(series, view.began_s), strict=True)) for _, series in buckets]
    minutes = sorted(set.intersection(*(set(curve) for curve in curves)))
    heights = [[curve[minute] for minute in minutes] for curve in curves]
    below = [[0.0] * len(minutes), *heights]
    cells = [
        [max(0.0, a - b) for a, b in zip(row, under, strict=True)]
        for row, under in zip(heights, below, strict=False)
    ]
    axes.grid(visible=False)
    axes.pcolormesh(minutes, range(len(buckets)), cells, cmap="Oranges", shading="nearest")
    axes.set_yticks(range(len(buckets)), [f"≤ {name}" if name != "+Inf" else "more" for name, _ in buckets])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minute, _place: f"{minute:g} min"))


def _finish(axes: Axes, panel: Panel, view: View) -> None:
    shown = formatter(panel.unit)
    _, low, _, high = axes.dataLim.extents
    if low == high:
        axes.set_ylim(min(0.0, 1.2 * low), max(1.0 if low == 0 else 0.0, 1.2 * high))
    elif 0 <= low < 0.6 * high:
        axes.set_ylim(bottom=0)
    axes.set_xlim(0, (view.ended_s - view.began_s) / 60)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minute, _place: f"{minute:g} min"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: shown(value)))
    handles, names = axes.get_legend_handles_labels()
    if names:
        columns = 4 if max(map(len, names)) < 16 else 3
        handles, names = handles[:_MOST_LEGENDS], names[:_MOST_LEGENDS]
        axes.legend(
            handles, names, loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncol=columns, frameon=False,
            handlelength=1.2, columnspacing=1.0,
        )  # fmt: skip


def save(view: View, folder: Path) -> list[Path]:
    """Write `dashboard-NAME.png` of every dashboard; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(_STYLE):
        for file in queries.files():
            figure = draw(file, view)
            written.append(folder / f"dashboard-{file.stem}.png")
            figure.savefig(written[-1], dpi=DPI)
    return written


def main() -> int:
    """Write the pictures and return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.grafana.draw", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus")
    parser.add_argument("--minutes", type=float, default=10.0, help="how far to look back")
    parser.add_argument("--run", default=queries.ALL_RUNS, help="regular expression of the runs' names")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    said: Any = parser.parse_args()
    now = time.time()
    prometheus = Prometheus(host=said.host, port=said.port)
    view = View(prometheus=prometheus, began_s=now - 60 * said.minutes, ended_s=now, run=said.run)
    for path in save(view, said.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
