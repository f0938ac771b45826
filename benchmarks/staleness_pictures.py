"""The ablation over staleness as two pictures: a row or panel per task, a colour per objective."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

Limits = Mapping[str, tuple[float, float]]
"""Lowest and highest return of each task."""


class Run(Protocol):
    """The fields of a run that are drawn."""

    @property
    def task(self) -> str:
        """Return the environment id."""
        ...

    @property
    def objective(self) -> str:
        """Return which form of PPO it is."""
        ...

    @property
    def staleness(self) -> int:
        """Return the lag in updates."""
        ...

    @property
    def mean_return(self) -> float:
        """Return the average over the second half of the steps."""
        ...

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Return (environment steps, mean return)."""
        ...


def summary(
    runs: Sequence[Run], limits: Limits, staleness: Sequence[int], objectives: Sequence[str], path: Path
) -> None:
    """Draw a panel per task: return over the second half of the steps against staleness.

    Seeds are dots, a line goes through their means.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, len(limits), squeeze=False)[0]
    for axis, task in zip(axes, limits, strict=True):
        for number, objective in enumerate(objectives):
            found = [
                [r.mean_return for r in runs if (r.task, r.objective, r.staleness) == (task, objective, lag)]
                for lag in staleness
            ]
            places = [place for place, returns in enumerate(found) if returns]
            axis.plot(places, [np.mean(found[p]) for p in places], color=f"C{number}", linewidth=2.5)
            for place in places:
                axis.plot([place] * len(found[place]), found[place], "o", color=f"C{number}", alpha=0.6)
        axis.set(title=task, xlabel="updates behind", ylim=_roomy(limits[task]))
        axis.set_xticks(range(len(staleness)), [str(lag) for lag in staleness])
        axis.set_xlim(-0.3, len(staleness) - 0.7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return, second half of the steps")
    _legend(axes[0], objectives)
    figure.savefig(path, dpi=110)


def curves(
    runs: Sequence[Run], limits: Limits, staleness: Sequence[int], objectives: Sequence[str], path: Path
) -> None:
    """Draw a panel per task and staleness.

    Each seed a thin line, the mean of an objective's seeds a thick one.
    """
    figure = Figure(figsize=(2.4 * len(staleness), 3.2 * len(limits)), layout="constrained")
    axes = figure.subplots(len(limits), len(staleness), sharey="row", squeeze=False)
    for row, task in zip(axes, limits, strict=True):
        for axis, lag in zip(row, staleness, strict=True):
            for number, objective in enumerate(objectives):
                chosen = [
                    r.curve for r in runs if (r.task, r.objective, r.staleness) == (task, objective, lag)
                ]
                _lines(axis, chosen, f"C{number}")
            axis.set(title=f"{lag} behind", ylim=_roomy(limits[task]))
            axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"{task}, mean return")
    figure.supxlabel("environment steps")
    _legend(axes[0][0], objectives)
    figure.savefig(path, dpi=110)


def _lines(axis: Any, chosen: Sequence[Sequence[tuple[int, float]]], colour: str) -> None:
    grid = np.linspace(0, max((curve[-1][0] for curve in chosen), default=0), 200)
    for curve in chosen:
        axis.plot(*zip(*curve, strict=True), color=colour, linewidth=0.8, alpha=0.5)
    if chosen:
        lines = [np.interp(grid, *np.array(curve).T) for curve in chosen]
        axis.plot(grid, np.mean(lines, axis=0), color=colour, linewidth=2.5)


def _roomy(limits: tuple[float, float]) -> tuple[float, float]:
    room = 0.03 * (limits[1] - limits[0])
    return limits[0] - room, limits[1] + room


def _legend(axis: Any, objectives: Sequence[str]) -> None:
    lines = [Line2D([], [], color=f"C{number}", linewidth=2.5) for number in range(len(objectives))]
    axis.legend(lines, objectives, loc="lower left")
