"""`penstock graph RUN`: the learning curve as text, again and again while the run goes on.

A character holds 2 × 4 dots (Unicode's Braille patterns), so that a terminal of 80 columns shows 140 points.
"""

import itertools
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.config.configuration_error import ConfigurationError
from penstock.launch.inspection.curve import Curve, Point
from penstock.launch.inspection.observation import METRICS_FILE, is_going_on
from penstock.launch.inspection.returns import shown
from penstock.runtime.exit import EXIT_OK

_BLANK: Final = 0x2800
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a Braille pattern, by row and column."""
_LABEL: Final = 10
_FEWEST_COLUMNS: Final = 24
_ROWS: Final = 16
_HOME: Final = "\x1b[H\x1b[J"


def main(run: Path, *, once: bool, interval_s: float) -> int:
    """Draw until the run has ended or Ctrl-C; once where `once` is given or stdout is no terminal.

    Raises ConfigurationError for a folder that holds no run.
    """
    file = run / METRICS_FILE
    if not file.exists():
        raise ConfigurationError(f"{run}: holds no {METRICS_FILE}, so no run; see `ls runs`")
    curve, pause = Curve(file), threading.Event()
    follows = not once and sys.stdout.isatty()
    while True:
        goes_on = follows and is_going_on(run)
        size = shutil.get_terminal_size()
        picture = drawn(curve.poll(), size.columns, min(_ROWS, max(size.lines - 5, 4)))
        sys.stdout.write(f"{_HOME if follows else ''}{run.name}\n{picture}\n")
        sys.stdout.flush()
        if not goes_on:
            return EXIT_OK
        pause.wait(interval_s)


def drawn(points: Sequence[Point], columns: int, rows: int) -> str:
    """Return the mean return of training episodes over environment steps, as lines of text.

    columns, rows: of the whole, in characters; rows without the two lines below.
    """
    known = [(one.env_steps, one.mean_return) for one in points if one.mean_return is not None]
    if not known:
        return "nothing learned yet"
    last, value = known[-1]
    told = f"mean return {shown(value)} of the last 100 training episodes, after {last:,} steps"
    return "\n".join([*_plot(known, max(columns, _FEWEST_COLUMNS) - _LABEL - 1, rows), told])


def _plot(known: Sequence[tuple[int, float]], wide: int, tall: int) -> list[str]:
    low, high = min(value for _, value in known), max(value for _, value in known)
    span, end = (high - low) or 1.0, known[-1][0] or 1
    cells = [[_BLANK] * wide for _ in range(tall)]
    placed = [
        (
            round(step / end * (2 * wide - 1)),
            round((high - value) / span * (4 * tall - 1)),
        )
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
    """Return the dots of a straight line from one dot to another, both among them."""
    steps = max(abs(after[0] - before[0]), abs(after[1] - before[1]), 1)
    return [
        (
            round(before[0] + (after[0] - before[0]) * step / steps),
            round(before[1] + (after[1] - before[1]) * step / steps),
        )
        for step in itertools.chain(range(steps), [steps])
    ]
