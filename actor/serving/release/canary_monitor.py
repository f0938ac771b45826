"""The canary on canary_monitor: what its clients see, against what those of the active version see.

Every episode of either arm, and every request without one, is an outcome; `penstock.registry.safety` says
after each whether the canary is worse. A canary that is found worse is withdrawn at once, by name: whoever
else comes second changes nothing. Each server judges by the clients it has.
"""

import logging
from collections.abc import Callable
from typing import Final

from actor.serving.episodes.episodes import Episode
from actor.serving.versions.answering import Answered
from penstock.config.settings import CanarySection
from penstock.registry import safety
from penstock.registry.bounds import Bounds, Outcome, observed_range
from penstock.registry.cohort import Cohort
from penstock.registry.records import Evaluation
from penstock.registry.routing import Arm
from penstock.registry.safety import State, Verdict
from penstock.runtime import metrics

log = logging.getLogger(__name__)

_JUDGED: Final = (Arm.ACTIVE, Arm.CANARY)


class CanaryMonitor:
    """One event loop uses it. `withdraw` is told version and reason."""

    def __init__(self, section: CanarySection, withdraw: Callable[[int, str], None]) -> None:
        self._section, self._withdraw = section, withdraw
        self._pair: tuple[int, int] | None = None
        self._bounds: Bounds | None = None
        self._has_range = False
        self.state = State()
        self._cohorts = {arm: Cohort() for arm in _JUDGED}
        self._round = 0
        """Tickets of a trial that is over count for nothing."""

    def steer(self, active: int | None, canary: int | None, evaluation: Evaluation | None) -> None:
        """Judge this canary against this version, anew when either is another one.

        evaluation: of the active one.
        """
        pair = None if active is None or canary is None else (canary, active)
        if pair == self._pair:
            if pair is not None and self.state.verdict is Verdict.WITHDRAW:
                # The registry may have been away when it was told.
                self._withdraw(pair[0], self.state.explain())
            return
        self._pair, self._round = pair, self._round + 1
        self.state, self._cohorts = State(), {arm: Cohort() for arm in _JUDGED}
        self._bounds = None if pair is None else self._bounds_of(evaluation)

    def begin(self, episode: Episode) -> None:
        """An episode begins."""
        if self._bounds is not None and episode.arm in _JUDGED:
            episode.ticket = (self._round, self._cohorts[episode.arm].begin())

    def end(self, episode: Episode, *, is_whole: bool) -> None:
        """It is over. One that was abandoned, not `is_whole`, counts by its answers alone."""
        if episode.ticket is None or episode.ticket[0] != self._round:
            return
        has_return = is_whole and self._has_range and episode.is_rewarded
        outcome = Outcome(
            total_return=episode.total_return if has_return else None,
            answers=episode.answers,
            errors=episode.errors,
            slow=episode.slow,
            not_finite=episode.not_finite,
        )
        self._observe(episode.arm, episode.ticket[1], outcome if episode.answers else None)

    def answered(self, answered: Answered) -> None:
        """A request without an episode was answered."""
        if self._bounds is None or answered.arm not in _JUDGED:
            return
        outcome = Outcome(
            total_return=None,
            answers=1,
            errors=int(bool(answered.fallback)),
            slow=int(answered.seconds > self._section.slow_ms / 1000),
            not_finite=int(answered.not_finite),
        )
        self._observe(answered.arm, self._cohorts[answered.arm].begin(), outcome)

    def _bounds_of(self, evaluation: Evaluation | None) -> Bounds:
        given = self._section.return_range
        known = given or (None if evaluation is None else observed_range(evaluation))
        self._has_range = known is not None
        low, high = known or (0.0, 1.0)
        return Bounds(
            low=low,
            high=high,
            horizon=self._section.horizon,
            false_alarm=self._section.false_alarm,
        )

    def _observe(self, arm: Arm, ticket: int, outcome: Outcome | None) -> None:
        assert self._bounds is not None
        episode_step = self._cohorts[arm].end(ticket, outcome)
        if arm is Arm.CANARY and outcome is not None and outcome.not_finite and outcome not in episode_step:
            # No matter of chance: it waits for no episode that began before.
            episode_step = [outcome]
        for one in episode_step:
            before = self.state.verdict
            self.state = safety.observe(self.state, self._bounds, one, canary=arm is Arm.CANARY)
            if self.state.verdict is not before:
                self._decide()

    def _decide(self) -> None:
        assert self._pair is not None
        canary, _ = self._pair
        log.info("canary judged", extra={"version": canary, "verdict": self.state.explain()})
        if self.state.verdict is Verdict.WITHDRAW:
            metrics.CANARIES_WITHDRAWN.inc()
            self._withdraw(canary, self.state.explain())
