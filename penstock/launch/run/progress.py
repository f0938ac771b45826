"""How far a run is, read from the learner's `metrics.jsonl`.

The learner appends one JSON object per line; a line that is still being written is read next time.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.launch.inspection.metrics_lines import parse_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One line of `metrics.jsonl`, in what people watch. NaN: not known yet."""

    env_steps: int = 0
    updates: int = 0
    publications: int = 0
    steps_per_second: float = math.nan
    mean_return: float = math.nan
    staleness: float = math.nan
    outstanding: int = 0
    budget: int = 0
    log_bytes: int = 0
    training_seconds: float = math.nan


class MetricsTail:
    """Reads a growing `metrics.jsonl`; a missing file is an empty one.

    The learner writes lines from its first second on, so the first ones tell of no experience.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._first = None if self._offset else Progress()
        self._last: Progress | None = None

    def poll(self) -> Progress | None:
        """The newest progress, None until the first experience after this launcher's start."""
        rows = self._new_rows()
        if rows:
            self._first = self._first or to_progress(rows[0])
            self._last = to_progress(rows[-1])
        return self._last if self._has_begun() else None

    def _has_begun(self) -> bool:
        first, last = self._first, self._last
        if first is None or last is None:
            return False
        new = last.env_steps > first.env_steps or last.updates > first.updates
        return new or last.outstanding > 0

    def _new_rows(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A crash may have torn one; the learner begins another below it.
        return [row for row in map(parse_line, lines) if row is not None]


def to_progress(row: dict[str, Any]) -> Progress:
    """The fields of one line."""
    return Progress(
        env_steps=int(_number(row, "env_steps", 0)),
        updates=int(_number(row, "updates", 0)),
        publications=int(_number(row, "publications", 0)),
        steps_per_second=_number(row, "steps_per_second"),
        mean_return=_number(row, "mean_return"),
        staleness=_number(row, "staleness_p50"),
        outstanding=int(_number(row, "outstanding", 0)),
        budget=int(_number(row, "budget", 0)),
        log_bytes=int(_number(row, "log_bytes", 0)),
        training_seconds=_number(row, "training_seconds"),
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a `metrics.jsonl`, without what a learner that went back has made again."""
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for row in filter(
            None, (parse_line(line.removesuffix(b"\n")) for line in file if line.endswith(b"\n"))
        ):
            while rows and rows[-1].get("env_steps", 0) > row.get("env_steps", 0):
                rows.pop()
            rows.append(row)
    return rows


def _number(row: dict[str, Any], key: str, default: float = math.nan) -> float:
    value = row.get(key)
    return default if value is None else float(value)
