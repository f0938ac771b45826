"""The canary on trial: what its clients see, against what those of the active version see.

    episodes ─► client_returns ─┐
                                ├─► `take` ─► the registry judges, for all servers together ─► `judged`
    answers ─► answer_windows ──┘      (`penstock.registry.judgement`, by the bets of `canary_trial`)

What a server has seen goes to the registry with each look at it, and the judgement comes back: several
servers and restarts make one trial. A canary that is found worse is withdrawn by name: a second server
changes nothing. An answer of no numbers, which the active version could give, withdraws at once.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from penstock.actor.serving.episodes.episodes import Episode
from penstock.actor.serving.release.answer_windows import AnswerWindows
from penstock.actor.serving.release.client_returns import ClientReturns
from penstock.actor.serving.versions.answering import Answered
from penstock.config.settings import CanarySection
from penstock.registry.bounds import Bounds, Seen
from penstock.registry.canary_trial import SHARES, TrialState, Verdict
from penstock.registry.judgement import Trial
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics

log = logging.getLogger(__name__)

MAX_WAITING: Final = 4096
"""Most that waits to be judged while the registry is away; the oldest gives way."""
MAX_AT_ONCE: Final = 1024
_JUDGED: Final = (Arm.ACTIVE, Arm.CANARY)


class CanaryMonitor:
    """One event loop uses it. `withdraw` is told version and reason. `now`: seconds, monotonic."""

    def __init__(
        self, section: CanarySection, withdraw: Callable[[int, str], None], now: Callable[[], float]
    ) -> None:
        self._slow_s, self._withdraw, self._now = section.slow_ms / 1000, withdraw, now
        self.bounds = Bounds(false_alarm=section.false_alarm, horizon=section.horizon)
        self._returns = ClientReturns(section.settle_s, section.return_range)
        self._windows = AnswerWindows(self._slow_s, now())
        self._waiting: deque[Seen] = deque(maxlen=MAX_WAITING)
        self._has_canary = self._is_unheard = self._is_told = self._is_counted = False
        self._part = 0.0
        self.trial: Trial | None = None
        self.state = TrialState()
        self._show()

    # ------------------------------------------------------------ what is seen

    def begin(self, episode: Episode) -> None:
        """Watch an episode that begins."""
        if self.trial is not None and episode.arm in _JUDGED:
            is_canary = episode.arm is Arm.CANARY
            episode.watched = self._returns.begin(
                episode, canary=is_canary, part=self._part, now_s=self._now()
            )

    def end(self, episode: Episode, *, is_whole: bool) -> None:
        """It is over; one that was abandoned is not whole."""
        if episode.watched is not None:
            episode.watched.end(episode, is_whole=is_whole)

    def answered(self, answered: Answered) -> None:
        """Count a request that was answered, or could not be."""
        if self.trial is None or answered.arm not in _JUDGED:
            return
        is_canary = answered.arm is Arm.CANARY
        self._windows.answered(answered, canary=is_canary, now_s=self._now())
        if is_canary and answered.is_to_blame and answered.not_finite:
            self._tell(self.trial, "an answer was not finite where the active version's was")

    # ------------------------------------------------------------ the trial

    def steer(self, arms: Arms) -> None:
        """Judge this canary against this active version; anew when either, or who follows them, changes."""
        # Told again with each look: the registry may have been away.
        self._has_canary, self._is_told = arms.canary is not None, False
        trial = Trial.of(arms)
        part = 0.0 if trial is None else trial.part_of(arms.traffic.canary_share)
        if (trial, part) != (self.trial, self._part):
            # A client that changes its arm now has earned returns on both.
            self._returns.clear()
            self._part = part
        if trial != self.trial:
            self.trial, self.state = trial, TrialState()
            self._is_counted = False
            self._waiting.clear()
            self._windows = AnswerWindows(self._slow_s, self._now())
        self._show()

    def take(self) -> list[Seen]:
        """Return what is to be judged next, at most MAX_AT_ONCE."""
        if self.trial is None:
            return []
        self._waiting.extend(self._windows.take(self._now()))
        self._waiting.extend(self._returns.settled(self._now()))
        return [self._waiting.popleft() for _ in range(min(MAX_AT_ONCE, len(self._waiting)))]

    def give_back(self, seen: list[Seen]) -> None:
        """Take back what was not judged: the registry could not be reached."""
        self._waiting.extendleft(reversed(seen[: MAX_WAITING - len(self._waiting)]))
        self._is_unheard = True
        self._show()

    def judged(self, trial: Trial, state: TrialState | None) -> None:
        """Take what all servers together have found; None where the trial is over."""
        self._is_unheard = False
        if state is not None and trial == self.trial:
            before, self.state = self.state.verdict, state
            if state.verdict is not before:
                log.info("canary judged", extra={"version": trial.canary, "verdict": state.explain()})
            if state.verdict is Verdict.WITHDRAW:
                self._tell(trial, state.explain())
        self._show()

    def _tell(self, trial: Trial, why: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            metrics.CANARIES_WITHDRAWN.inc()
        if not self._is_told:
            self._is_told = True
            self._withdraw(trial.canary, why)

    def _show(self) -> None:
        is_judged = self.trial is not None
        unguarded = {
            "no_comparison": self._has_canary and not is_judged,
            "registry": is_judged and self._is_unheard,
            "returns": is_judged and (self.state.is_full or not self.state.compares_returns),
        }
        for reason, holds in unguarded.items():
            metrics.CANARY_UNGUARDED.labels(reason).set(holds)
        metrics.CANARY_UNDECIDED.set(is_judged and self.state.verdict is Verdict.UNDECIDED)
        for cause in SHARES:
            progress = self.state.progress(cause, self.bounds.false_alarm) if is_judged else 0.0
            metrics.CANARY_EVIDENCE.labels(cause).set(progress)
