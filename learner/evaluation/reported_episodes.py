"""Episodes as the actors report them: the window that the curve is drawn from, and evaluations.

Runs in its own thread and reads the reports by position, so that no update waits for them. Window and
position go into the checkpoint: a resumed curve goes on where it stopped.
"""

import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.learner_records import ReportEntry
from penstock.learner.evaluation.evaluation import Evaluation, Result, way
from penstock.learner.lease import LeaseKeeper
from penstock.learner.reporting.episode_log import EpisodeLog
from penstock.runtime import metrics

WINDOW: Final = 100
_READ: Final = 512
_WAIT_S: Final = 0.1

log = logging.getLogger(__name__)


class Episodes:
    """Return and length of the last training episodes. `run` is a thread's body."""

    def __init__(
        self,
        learner_log: LearnerLog,
        lease: LeaseKeeper,
        evaluation: Evaluation,
        stop: threading.Event,
        on_result: Callable[[Result], None],
        episode_log: EpisodeLog | None = None,
    ) -> None:
        self._log = learner_log
        self._lease = lease
        self._evaluation = evaluation
        self._stop = stop
        self._on_result = on_result
        self._episode_log = episode_log
        self._lock = threading.Lock()
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._after = 0
        self.count = 0

    def restore(self, state: dict[str, Any]) -> None:
        """Become what `state` was taken from."""
        with self._lock:
            self._returns.extend(state["returns"])
            self._lengths.extend(state["lengths"])
            self._after, self.count = int(state["after"]), int(state["count"])

    def state(self) -> dict[str, Any]:
        """Return a JSON object for a checkpoint."""
        with self._lock:
            return {
                "returns": list(self._returns),
                "lengths": list(self._lengths),
                "after": self._after,
                "count": self.count,
            }

    def recent(self) -> list[float]:
        """Returns of the last training episodes, newest last."""
        with self._lock:
            return list(self._returns)

    def means(self) -> tuple[float | None, float | None]:
        """Mean return and mean length of the last training episodes; None before the first."""
        with self._lock:
            if not self._returns:
                return None, None
            return statistics.fmean(self._returns), statistics.fmean(self._lengths)

    def run(self) -> None:
        """Read until `stop`."""
        while not self._stop.is_set():
            entries = self._log.read_reports(self._after, _READ)
            for entry in entries:
                self._take(entry)
            if len(entries) < _READ:
                self._stop.wait(_WAIT_S)

    def _take(self, entry: ReportEntry) -> None:
        report = entry.report
        if report.evaluation:
            result = self._evaluation.collect(report)
            if result is not None:
                self._finish(result)
        elif self._episode_log is not None and report.episodes:
            self._episode_log.add(self.count + 1, report.episodes)
        with self._lock:
            self._after = entry.number
            if not report.evaluation:
                self.count += len(report.episodes)
                self._returns.extend(episode.episode_return for episode in report.episodes)
                self._lengths.extend(episode.length for episode in report.episodes)
        mean, _ = self.means()
        if mean is not None:
            metrics.MEAN_RETURN.set(mean)

    def _finish(self, result: Result) -> None:
        for deterministic, score in result.scores.items():
            metrics.EVALUATION_RETURN.labels(way(deterministic=deterministic)).set(score.mean)
        if self._evaluation.best is not None:
            metrics.EVALUATION_BEST_RETURN.set(self._evaluation.best.mean)
        metrics.EVALUATIONS_WITHOUT_IMPROVEMENT.set(self._evaluation.without_improvement)
        log.info("evaluated", extra=_words(result))
        self._on_result(result)
        # Nothing is left to play, so a restarted evaluation actor does not play it again.
        self._lease.patiently(lambda: self._log.end_evaluation(result.candidate.version))


def _words(result: Result) -> dict[str, float]:
    means = {way(deterministic=played): score.mean for played, score in result.scores.items()}
    return {
        "version": result.candidate.version,
        **means,
        "std": result.std,
        "episodes": result.episodes,
        "env_steps": result.candidate.env_steps,
    }
