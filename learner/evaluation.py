"""When the policy is evaluated, what came back, and whether the task is solved.

The loop asks `wanted` after each update. When it says yes the next publication is pinned and offered
to the evaluation actors (`requested`), training goes on, and the episodes they report are gathered
(`collect`) until there are `evaluation.episodes` of that version. `solved` is only ever taken from
such a result, never from the moving average of training episodes that asked for it. An evaluation
actor that dies half-way begins again: an episode is known by its slot and its number.
"""

import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.settings import EvaluationSection
from penstock.wire.messages import Report

RECENT_EPISODES = 20
"""Training episodes whose mean must reach the target before an evaluation is worth its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Published weights that were sent to be evaluated. at_s: seconds of training when they were made."""

    version: int
    update: int
    env_steps: int
    at_s: float
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Undiscounted returns of one version over fixed seeds."""

    candidate: Candidate
    mean: float
    std: float
    episodes: int


class Evaluation:
    """Asked and told from several threads."""

    def __init__(self, section: EvaluationSection, target: float | None, *, stop_at_target: bool) -> None:
        self._section = section
        self._target = target
        self._stop_at_target = stop_at_target
        self._lock = threading.Lock()
        self._asked = False
        self._pending: Candidate | None = None
        self._returns: dict[tuple[int, int], float] = {}
        self._last_steps = 0
        self._last_update = -1
        self.last: Result | None = None
        self.best: Result | None = None

    def wanted(self, recent: Sequence[float], *, update: int, env_steps: int) -> bool:
        """Whether the weights of `update` should be evaluated. recent: returns, newest last.

        True at most once until the result is there. Tell `requested` next.
        """
        with self._lock:
            if self._asked or self._pending is not None or update <= self._last_update:
                return False
            self._asked = self._promising(recent) or self._due(env_steps)
            return self._asked

    def ask(self, update: int) -> bool:
        """Ask for `update` whatever the curve says; False when it is under way or done already."""
        with self._lock:
            if self._pending is not None or update <= self._last_update:
                return False
            self._asked = True
            return True

    def requested(self, candidate: Candidate) -> Candidate | None:
        """The weights were published and offered to the evaluation actors; the candidate they replace."""
        with self._lock:
            replaced = self._pending
            self._asked, self._pending, self._returns = False, candidate, {}
            self._last_update, self._last_steps = candidate.update, candidate.env_steps
            return replaced

    def abandon(self) -> Candidate | None:
        """Nobody answered: no result is waited for any longer. The candidate that it was."""
        with self._lock:
            abandoned = self._pending
            self._asked, self._pending = False, None
            return abandoned

    def collect(self, report: Report) -> Result | None:
        """Take a report in; the result when it completes one."""
        with self._lock:
            candidate = self._pending
            if candidate is None or report.deterministic != self._section.deterministic:
                return None
            for episode in report.episodes:
                if episode.version == candidate.version:
                    self._returns[episode.slot_id, episode.episode_id] = episode.episode_return
            if len(self._returns) < self._section.episodes:
                return None
            return self._complete(candidate, list(self._returns.values()))

    @property
    def pending(self) -> bool:
        """Whether a result is being waited for."""
        with self._lock:
            return self._asked or self._pending is not None

    @property
    def solved(self) -> Result | None:
        """The result that reached the target: the last one where it did, else the best one."""
        with self._lock:
            reached = [r for r in (self.last, self.best) if r is not None and self._reaches(r.mean)]
            return reached[0] if reached else None

    def _complete(self, candidate: Candidate, returns: Sequence[float]) -> Result:
        result = Result(
            candidate=candidate,
            mean=statistics.fmean(returns),
            std=statistics.pstdev(returns),
            episodes=len(returns),
        )
        self._pending = None
        self.last = result
        if self.best is None or result.mean >= self.best.mean:
            self.best = result
        return result

    def _reaches(self, mean: float) -> bool:
        return self._target is not None and mean >= self._target

    def _promising(self, recent: Sequence[float]) -> bool:
        newest = recent[-RECENT_EPISODES:]
        enough = self._stop_at_target and len(newest) == RECENT_EPISODES
        return enough and self._reaches(statistics.fmean(newest))

    def _due(self, env_steps: int) -> bool:
        interval = self._section.interval_steps
        return interval is not None and env_steps - self._last_steps >= interval
