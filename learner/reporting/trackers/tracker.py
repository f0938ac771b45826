"""Passes each line of `metrics.jsonl` to the trackers that the configuration names, under the same names.

    learner's loop ─offer─► queue per tracker ─► its thread ─► tracker (opened with its first line)

A tracker never delays or ends training: the loop only puts a line into a queue, and drops it where the
queue is full; an error of a tracker is counted (`penstock_tracker_failures_total`), logged, and the tracker
is tried again with later lines. A resumed learner goes on in the same place, from the step of its checkpoint.
"""

import importlib
import importlib.util
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.config.configuration_error import how_to_install
from penstock.config.settings import ConfigurationError, Settings
from penstock.runtime import metrics

QUEUE_LINES: Final = 256
"""Lines of about a minute; a tracker that is further behind loses some."""
REOPEN_S: Final = 30.0
"""Seconds after which a tracker that could not be opened is tried again."""
CLOSE_S: Final = 3.0
"""Seconds that trackers have to write their last lines when the learner ends."""
_MODULES: Final = {
    "tensorboard": "penstock.learner.reporting.trackers.event_files",
    "wandb": "penstock.learner.reporting.trackers.weights_and_biases",
}
_NO_VALUES: Final = ("time", "env_steps")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run for which a tracker is opened. first_step: environment steps at which this learner began."""

    settings: Settings
    run_dir: Path
    first_step: int


class Tracker(Protocol):
    """An open tracker, used by one thread; its methods may raise any error."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Write values at a count of environment steps and a Unix time."""

    def close(self) -> None:
        """Write the remaining values."""


class Tracking:
    """The trackers of a learner."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._feeds = [_Feed(name, opener) for name, opener in openers.items()]

    def offer(self, row: Mapping[str, Any]) -> None:
        """Pass a line on; never waits."""
        for feed in self._feeds:
            feed.offer(row)

    def close(self) -> None:
        """Let trackers finish their lines, for CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))


class _Feed:
    """The queue and the thread of one tracker."""

    def __init__(self, name: str, opener: Callable[[], Tracker]) -> None:
        self._name, self._opener = name, opener
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(QUEUE_LINES)
        self._tracker: Tracker | None = None
        self._failed, self._open_at = 0, -math.inf
        metrics.TRACKER_FAILURES.labels(name)
        self._thread = threading.Thread(target=self._run, name=f"track-{name}", daemon=True)
        self._thread.start()

    def offer(self, row: Mapping[str, Any] | None) -> bool:
        try:
            self._lines.put_nowait(row)
        except queue.Full:
            self._count("is too slow")
            return False
        return True

    def end(self) -> None:
        """Send the end to the thread: a line makes room for it where the queue is full."""
        while not self.offer(None):
            with suppress(queue.Empty):
                self._lines.get_nowait()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("a tracker did not finish in time", extra={"tracker": self._name})

    def _run(self) -> None:
        while (row := self._lines.get()) is not None:
            self._try(self._write, row)
        if self._tracker is not None:
            self._try(self._tracker.close)

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._tracker is None:
            if time.monotonic() < self._open_at:
                self._count("is not open")
                return
            self._open_at = time.monotonic() + REOPEN_S
            self._tracker = self._opener()
        self._tracker.write(int(row["env_steps"]), float(row["time"]), dict(_values(row)))

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, the learner goes on
            self._count(f"{type(error).__name__}: {error}")

    def _count(self, why: str) -> None:
        """Count a failure; the first is logged, later ones ever more rarely.

        Lines come four times a second.
        """
        metrics.TRACKER_FAILURES.labels(self._name).inc()
        self._failed += 1
        if self._failed & (self._failed - 1) == 0:
            words = {"tracker": self._name, "failures": self._failed, "cause": why}
            log.warning("a tracker did not take a line; training goes on", extra=words)


def make_tracking(place: TrackedRun) -> Tracking:
    """Return the trackers that `metrics.trackers` names."""
    return Tracking({name: _opener(name, place) for name in place.settings.metrics.trackers})


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigurationError for a tracker whose extra is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(
                f"metrics.trackers={name!r}: not installed; {how_to_install(name)}, or leave it out"
            )


def _opener(name: str, place: TrackedRun) -> Callable[[], Tracker]:
    """Return a function that opens the tracker; its module is imported then, which may take seconds."""

    def opened() -> Tracker:
        tracker: Tracker = importlib.import_module(_MODULES[name]).open_tracker(place)
        return tracker

    return opened


def _values(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in row.items():
        if name not in _NO_VALUES and isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)
