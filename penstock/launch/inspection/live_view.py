"""Views of a running run for people: a live view on a terminal, plain lines elsewhere.

Both have the same methods and are context managers; a view belongs to one thread.
"""

import errno
import math
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TextIO, TypeVar, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from penstock.config.sections import LearnerSection
from penstock.launch.inspection.curve import Progress, shown

PLAIN_INTERVAL_S: Final = 2.0
_REFRESHES_PER_SECOND: Final = 4
_MIB: Final = 1024 * 1024

Limits = Mapping[str, float]
"""What ends a run, by unit: updates, seconds or steps."""


def limits_of(learner: LearnerSection) -> Limits:
    most = {"updates": learner.total_updates, "seconds": learner.total_seconds, "steps": learner.total_steps}
    return {unit: limit for unit, limit in most.items() if limit is not None}


def nearest_end(progress: Progress, limits: Limits) -> tuple[str, float, float | None]:
    """Return the unit of the limit that a run is nearest to, how much is done, and the limit."""
    seconds = 0.0 if math.isnan(progress.training_seconds) else progress.training_seconds
    done = {"updates": progress.updates, "seconds": seconds, "steps": progress.env_steps}
    unit = max(limits, key=lambda one: done[one] / limits[one], default="steps")
    return unit, done[unit], limits.get(unit)


class PlainView:
    """A line per event, and one every PLAIN_INTERVAL_S with the progress."""

    def __init__(self, stream: TextIO, limits: Limits, target: float | None) -> None:
        self._stream = stream
        self._limits = limits
        self._target = target
        self._last_s = -math.inf
        self._last = ""

    def event(self, text: str) -> None:
        self._write(text)

    def show(self, progress: Progress) -> None:
        """Write a line unless the last one is recent or the same: a run may be idle for days."""
        now = time.monotonic()
        if now - self._last_s < PLAIN_INTERVAL_S:
            return
        unit, done, limit = nearest_end(progress, self._limits)
        total = "" if limit is None else f"/{limit:,.0f}"
        text = f"{unit} {done:,.0f}{total}  " + "  ".join(map(" ".join, facts(progress, self._target, unit)))
        if text == self._last:
            return
        self._last_s, self._last = now, text
        self._write(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def _write(self, text: str) -> None:
        self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._stream.flush()


class LiveView:
    """A progress bar with a table of the newest figures below it; events scroll above."""

    def __init__(self, console: Console, title: str, limits: Limits, target: float | None) -> None:
        self._target, self._limits = target, limits
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn(
                "{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"
                if limits
                else "{task.completed:,.0f} steps"
            ),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        unit, _, limit = nearest_end(Progress(), limits)
        self._task = self._bar.add_task(title, total=limit, unit=unit)
        self._live = Live(
            self._bar, console=console, refresh_per_second=_REFRESHES_PER_SECOND, redirect_stderr=False
        )

    def event(self, text: str) -> None:
        # Not as markup: a message may contain brackets.
        self._live.console.print(Text.assemble((time.strftime("%H:%M:%S"), "dim"), f" {text}"))

    def show(self, progress: Progress) -> None:
        unit, done, limit = nearest_end(progress, self._limits)
        self._bar.update(self._task, completed=done, total=limit, unit=unit)
        table = Table.grid(expand=True)
        columns = facts(progress, self._target, unit)
        for _ in columns:
            table.add_column(justify="center")
        table.add_row(*(f"[dim]{name}[/dim]" for name, _ in columns))
        table.add_row(*(f"[bold]{value}[/bold]" for _, value in columns))
        self._live.update(Group(self._bar, table))

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


View = PlainView | LiveView


def make_view(stream: TextIO, title: str, limits: Limits, target: float | None) -> View:
    """Return a live view where `stream` is a terminal, else plain lines."""
    stream = cast("TextIO", WatchedStream(stream))
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, title, limits, target)
    return PlainView(stream, limits, target)


def facts(progress: Progress, target: float | None, unit: str) -> list[tuple[str, str]]:
    """Return names and figures of a run, without the one that the bar or the line begins with."""
    goal = "" if target is None else f" of {target:g}"
    share = f"{progress.outstanding / progress.budget:.0%}" if progress.budget else "–"
    counts = [("steps", f"{progress.env_steps:,}"), ("updates", f"{progress.updates:,}")]
    return [
        ("rate", f"{_text(progress.steps_per_second, ',.0f')}/s"),
        ("return", f"{shown(progress.mean_return)}{goal}"),
        ("staleness", _text(progress.staleness_p50, ".1f")),
        ("buffer", f"{share} {progress.log_bytes / _MIB:.1f} MiB"),
        *(one for one in counts if one[0] != unit),
        ("publications", f"{progress.publications:,}"),
    ]


def _text(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


# ---- The output stream of a run, whose reader may go away while the run continues.

T = TypeVar("T")
_READER_IS_GONE: Final = (errno.EPIPE, errno.EIO)


class WatchedStream:
    """A stream that discards output once its reader is gone; other methods are those of the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._do(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._do(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except OSError as error:
            if error.errno not in _READER_IS_GONE:
                raise
            # Buffered output is discarded, too, also at the end of the process.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return otherwise
