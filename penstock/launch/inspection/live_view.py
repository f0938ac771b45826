"""Views of a running run for people: a live view on a terminal, plain lines elsewhere.

Both have the same methods and are context managers; a view belongs to one thread.
"""

import errno
import math
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TextIO, TypeVar, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from penstock.launch.inspection.curve import Progress, shown

PLAIN_INTERVAL_S: Final = 2.0
_REFRESHES_PER_SECOND: Final = 4
_MIB: Final = 1024 * 1024


class PlainView:
    """A line per event, and one every PLAIN_INTERVAL_S with the progress."""

    def __init__(self, stream: TextIO, total_steps: int | None, target: float | None) -> None:
        self._stream = stream
        self._total = total_steps
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
        total = f"/{self._total:,}" if self._total else ""
        text = f"steps {progress.env_steps:,}{total}  " + "  ".join(
            map(" ".join, facts(progress, self._target))
        )
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

    def __init__(self, console: Console, title: str, total_steps: int | None, target: float | None) -> None:
        self._target = target
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn(
                "{task.completed:,.0f}/{task.total:,.0f} steps"
                if total_steps
                else "{task.completed:,.0f} steps"
            ),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task(title, total=total_steps)
        self._live = Live(
            self._bar, console=console, refresh_per_second=_REFRESHES_PER_SECOND, redirect_stderr=False
        )

    def event(self, text: str) -> None:
        # Not as markup: a message may contain brackets.
        self._live.console.print(Text.assemble((time.strftime("%H:%M:%S"), "dim"), f" {text}"))

    def show(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.env_steps)
        table = Table.grid(expand=True)
        columns = facts(progress, self._target)
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


def make_view(stream: TextIO, title: str, total_steps: int | None, target: float | None) -> View:
    """Return a live view where `stream` is a terminal, else plain lines."""
    stream = cast("TextIO", WatchedStream(stream))
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, title, total_steps, target)
    return PlainView(stream, total_steps, target)


def facts(progress: Progress, target: float | None) -> list[tuple[str, str]]:
    goal = "" if target is None else f" of {target:g}"
    share = f"{progress.outstanding / progress.budget:.0%}" if progress.budget else "–"
    return [
        ("rate", f"{_text(progress.steps_per_second, ',.0f')}/s"),
        ("return", f"{shown(progress.mean_return)}{goal}"),
        ("staleness", _text(progress.staleness_p50, ".1f")),
        ("buffer", f"{share} {progress.log_bytes / _MIB:.1f} MiB"),
        ("updates", f"{progress.updates:,}"),
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
