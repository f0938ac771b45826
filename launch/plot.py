"""Learning curves as PNG: mean return of the last 100 training episodes over environment steps."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from launch.plan import CONFIG_FILE
from launch.progress import read_rows
from penstock.runtime.settings import ConfigurationError, load, parse_toml

_INCHES: Final = (8.0, 4.5)
_DPI: Final = 120


def draw(runs: Sequence[Path], output: Path) -> None:
    """Overlay the curves of `runs`; raises ConfigurationError for a folder that holds no run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run in runs:
        _draw_run(axes, run)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return, mean of the last 100 training episodes")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(output)


def _draw_run(axes: Any, run: Path) -> None:
    try:
        rows = read_rows(run / "metrics.jsonl")
    except FileNotFoundError:
        raise ConfigurationError(f"{run}: holds no metrics.jsonl, so no run; see `ls runs`") from None
    points = curve(rows)
    steps, returns = zip(*points, strict=True) if points else ((), ())
    axes.plot(steps, returns, linewidth=1.5, label=_label(run))


def curve(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Steps and mean return; where a resumed learner did steps again, what it did the second time."""
    points: list[tuple[int, float]] = []
    for row in rows:
        while points and points[-1][0] >= row["env_steps"]:
            points.pop()
        if _is_known(row):
            points.append((row["env_steps"], row["mean_return"]))
    return points


def _is_known(row: dict[str, Any]) -> bool:
    value = row.get("mean_return")
    return value is not None and not math.isnan(value)


def _label(run: Path) -> str:
    config = run / CONFIG_FILE
    settings = load([parse_toml(config)]) if config.exists() else None
    return f"{settings.environment.id}, seed {settings.seed} ({settings.run})" if settings else run.name
