"""A run's `metrics.jsonl` as a curve: at most MAX_POINTS points, however long the run.

Read while it grows, for a picture at the end and for a page that reads every second. When there are too many
points every second one is removed, and later ones are thinned as much; the newest line is always the last
point. A resumed learner repeats some steps: the second time counts. A line that is still being written is
read next time.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from penstock.config.run_folder import open_regular

# ---- Lines of a `metrics.jsonl`, which may end in a torn line, and may come from others.

COUNTS: Final = ("env_steps", "updates", "version")
_MOST: Final = 2**63
"""No count is larger; larger integers of JSON may not fit a float."""


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the figures of a line, numbers or None by name; None for a damaged line."""
    if not (line.startswith(b"{") and line.endswith(b"}")):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not all(map(_is_figure, row.values())):
        return None
    return row if all(math.isfinite(row.get(name) or 0) for name in COUNTS) else None


def _is_figure(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) <= _MOST
    return value is None or isinstance(value, float)


MAX_POINTS: Final = 2000
_READ_BYTES: Final = 1024 * 1024
_MOST_BYTES: Final = 256 * _READ_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment of a run. seconds: of training. staleness: median since the line before, in updates."""

    env_steps: int
    seconds: float
    updates: int
    version: int
    mean_return: float | None
    staleness: float | None


class _GrowingFile:
    """Reads the lines of a file that grows; a missing file is empty. offset: bytes that are skipped."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset, self._rest = path, offset, b""

    def lines(self) -> Iterator[bytes | None]:
        """Yield the whole lines since the last call; None before the lines of a file that replaced it."""
        try:
            with open_regular(self._path) as file:
                end = file.seek(0, os.SEEK_END)
                if end < self._offset:
                    self._offset, self._rest = 0, b""
                    yield None
                # Only the newest part of a larger file is read.
                self._offset = max(self._offset, end - _MOST_BYTES)
                file.seek(self._offset)
                while data := file.read(_READ_BYTES):
                    self._offset += len(data)
                    *lines, rest = (self._rest + data).split(b"\n")
                    self._rest = rest[-_READ_BYTES:]  # no learner writes a longer line
                    yield from lines
        except FileNotFoundError:
            self._offset, self._rest = 0, b""
            yield None


class Curve:
    """Reads the points of one file; a missing file is an empty one."""

    def __init__(self, path: Path, max_points: int = MAX_POINTS) -> None:
        self._file, self._max = _GrowingFile(path), max_points
        self._begin()

    def poll(self) -> list[Point]:
        """Return every point so far, oldest first, steps rising."""
        for line in self._file.lines():
            if line is None:
                self._begin()
            elif (row := parse_line(line)) is not None:
                self._add(_point(row, self._newest))
        newest = [] if self._newest in (None, *self._kept[-1:]) else [self._newest]
        return [*self._kept, *(point for point in newest if point is not None)]

    def _begin(self) -> None:
        self._kept: list[Point] = []
        self._newest: Point | None = None
        self._stride, self._skipped = 1, 0

    def _add(self, point: Point) -> None:
        kept = self._kept
        while kept and kept[-1].env_steps >= point.env_steps:
            kept.pop()
            self._skipped = self._stride
        self._newest = point
        self._skipped += 1
        if self._skipped < self._stride:
            return
        kept.append(point)
        self._skipped = 0
        if len(kept) > self._max:
            del kept[1::2]
            self._stride *= 2


def rates(points: Sequence[Point]) -> list[float | None]:
    """Return steps per second of training over the stretch that ends at each point; the first is None."""
    found: list[float | None] = [None] * min(1, len(points))
    for before, after in itertools.pairwise(points):
        seconds = after.seconds - before.seconds
        found.append((after.env_steps - before.env_steps) / seconds if seconds > 0 else None)
    return found


def _point(row: dict[str, Any], before: Point | None) -> Point:
    updates = int(row.get("updates") or 0)
    # Without an update since the line before there is no new staleness.
    has_learned = updates != (before.updates if before is not None else 0)
    return Point(
        env_steps=int(row.get("env_steps") or 0),
        seconds=_finite(row.get("training_seconds")) or 0.0,
        updates=updates,
        version=int(row.get("version") or 0),
        mean_return=_finite(row.get("mean_return")),
        staleness=_finite(row.get("staleness_p50")) if has_learned else None,
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The figures of a line of `metrics.jsonl` that people watch. NaN: not known yet."""

    env_steps: int = 0
    updates: int = 0
    publications: int = 0
    steps_per_second: float = math.nan
    mean_return: float = math.nan
    staleness_p50: float = math.nan
    outstanding: int = 0
    budget: int = 0
    log_bytes: int = 0
    training_seconds: float = math.nan

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        known = {one.name: row[one.name] for one in fields(cls) if row.get(one.name) is not None}
        return cls(**known)


class MetricsTail:
    """Reads a growing `metrics.jsonl`; a missing file is an empty one.

    The learner writes lines from its first second on, so the first ones are without experience.
    """

    def __init__(self, path: Path) -> None:
        offset = path.stat().st_size if path.exists() else 0
        self._file = _GrowingFile(path, offset)
        self._first = None if offset else Progress()
        self._last: Progress | None = None

    def poll(self) -> Progress | None:
        """The newest progress, None until the first experience after this launcher's start."""
        rows = [row for line in self._file.lines() if line and (row := parse_line(line)) is not None]
        if rows:
            self._first = self._first or Progress.of(rows[0])
            self._last = Progress.of(rows[-1])
        first, last = self._first, self._last
        if first is None or last is None:
            return None
        is_new = last.env_steps > first.env_steps or last.updates > first.updates
        return last if is_new or last.outstanding > 0 else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a `metrics.jsonl`, without steps that a resumed learner repeated."""
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        whole = (parse_line(line[:-1]) for line in file if line.endswith(b"\n"))
        for row in filter(None, whole):
            while rows and rows[-1].get("env_steps", 0) > row.get("env_steps", 0):
                rows.pop()
            rows.append(row)
    return rows


# ---- Format bytes and seconds for people.

_MIB: Final = 1024 * 1024
_GIB: Final = 1024 * _MIB
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600


def size(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def span(seconds: float) -> str:
    """Return seconds as text, in the largest two units that they fill."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if seconds < 2 * _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"


# ---- Format returns for people: one decimal from 10 on, three below.

_SMALL: Final = 10.0


def shown(value: float | None, like: float | None = None) -> str:
    """Return a return as text, with the decimals of `like` where it is given; "–" for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    digits = 3 if abs(value if like is None else like) < _SMALL else 1
    return f"{value:.{digits}f}"
