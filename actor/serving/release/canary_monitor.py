"""The canary on trial: what its clients see, against what those of the active version see.

    episodes ─► ClientReturns ─┐
                               ├─► `take` ─► the registry judges, for all servers together ─► `judged`
    answers ─► AnswerWindows ──┘      (`penstock.registry.traffic`)

Several servers and restarts make one trial. A canary that is found worse is withdrawn by name: a second
server changes nothing. An answer of no numbers, which the active version could give, withdraws at once.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from penstock.actor.serving.answering import Answered
from penstock.actor.serving.episodes import Episode
from penstock.config.settings import CanarySection
from penstock.registry.canary import (
    LEVEL_FACTOR,
    LEVELS,
    SHARES,
    ClientReturn,
    Seen,
    Trial,
    TrialState,
    Verdict,
    Window,
)
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics

# ---- How a canary answers, pooled over all clients in windows of a few seconds, beside the active version.

WINDOW_S: Final = 5.0
WINDOW_ANSWERS: Final = 256
MAX_WINDOWS: Final = 64
"""Most that wait to be taken; further ones are left out."""


@dataclass(slots=True)
class _Passes:
    """Answers of passes of one size: of the canary and of the active version, and how many were slow."""

    canary: int = 0
    canary_slow: int = 0
    active: int = 0
    active_slow: int = 0


@dataclass(slots=True)
class _Open:
    began_s: float
    answers: int = 0
    failed: int = 0
    not_finite: int = 0
    passes: dict[int, _Passes] = field(default_factory=lambda: defaultdict(_Passes))
    """By the power of two of their rows."""


class AnswerWindows:
    """Used by one event loop; times in seconds of one monotonic clock."""

    def __init__(self, slow_s: float, now_s: float) -> None:
        self._slow_s = slow_s
        self._open = _Open(now_s)
        self._closed: list[Window] = []

    def answered(self, answered: Answered, *, canary: bool, now_s: float) -> None:
        """One answer was given, or failed to be."""
        window = self._open
        if canary:
            window.answers += 1
            window.failed += answered.is_to_blame
            window.not_finite += answered.is_to_blame and answered.not_finite
        answer = answered.answer
        if answer is not None and answer.passed is not None and not answered.fallback:
            passes = window.passes[answer.passed.rows.bit_length()]
            is_slow = answer.passed.seconds > self._slow_s
            if canary:
                passes.canary += 1
                passes.canary_slow += is_slow
            else:
                passes.active += 1
                passes.active_slow += is_slow
        if window.answers >= WINDOW_ANSWERS:
            self._close(now_s)

    def take(self, now_s: float) -> list[Window]:
        """Return the windows that are over."""
        if now_s - self._open.began_s >= WINDOW_S or self._open.not_finite:
            self._close(now_s)
        closed, self._closed = self._closed, []
        return closed

    def _close(self, now_s: float) -> None:
        window, self._open = self._open, _Open(now_s)
        if window.answers and len(self._closed) < MAX_WINDOWS:
            self._closed.append(
                Window(
                    answers=window.answers,
                    failed=window.failed,
                    not_finite=window.not_finite,
                    slower=_slower(window.passes),
                )
            )


def _slower(passes: dict[int, _Passes]) -> float | None:
    """Return by how much more often the canary was slow; None without passes to compare with."""
    compared = active = active_slow = 0
    more = 0.0
    for size in sorted(passes, reverse=True):
        here = passes[size]
        active += here.active
        active_slow += here.active_slow
        if here.canary and active:
            compared += here.canary
            more += here.canary_slow - here.canary * active_slow / active
    return more / compared if compared else None


# ---- What each client of a canary's trial earns, until it has been compared at the last level.

MAX_WATCHED: Final = 4096
"""Most clients that are watched for one level at once."""


@dataclass(slots=True, eq=False)
class WatchedClient:
    """What is known of one client. client: digest of its key, "" for one without.

    part: its chance of the canary. total: of its `count` episodes that count. rated: of them, those with an
    opinion. newest: begun last.
    """

    client: str
    canary: bool
    part: float
    since_s: float
    newest: Episode
    total: float = 0.0
    count: int = 0
    rated: float = 0.0

    def end(self, episode: Episode, *, is_whole: bool) -> None:
        """One of its episodes is over; a return that was abandoned or never rewarded says nothing."""
        worth = _worth(episode)
        if worth is not None and (is_whole or episode.opinion is not None):
            self.total += worth.value
            self.rated += worth.rated or 0.0
            self.count += 1

    def worth(self) -> "Worth | None":
        """Return the mean of its episodes; that of the open one so far where none counts; None: neither."""
        if not self.count:
            return None if self.newest.is_over else _worth(self.newest)
        share = None if self.newest.opinion is None else self.rated / self.count
        return Worth(self.total / self.count, share)


class Worth(NamedTuple):
    """What episodes are worth. rated: share of them with an opinion; None: they have returns."""

    value: float
    rated: float | None


def _worth(episode: Episode) -> Worth | None:
    opinion = episode.opinion
    if opinion is None:
        return Worth(episode.total_return, None) if episode.is_rewarded else None
    return Worth(float(opinion.likes), float(opinion.newest is not None)) if opinion.counts else None


class ClientReturns:
    """Used by one event loop; times in seconds of one monotonic clock."""

    def __init__(self, settle_s: float, returns: tuple[float, float] | None) -> None:
        """settle_s: after which a client is compared first. returns: outside which none is believed."""
        self._ages_s = tuple(settle_s * LEVEL_FACTOR**level for level in range(LEVELS))
        self._low, self._high = returns or (-float("inf"), float("inf"))
        self._known: dict[str, WatchedClient] = {}
        self._due: tuple[deque[WatchedClient], ...] = tuple(deque() for _ in range(LEVELS))

    def begin(self, episode: Episode, *, canary: bool, part: float, now_s: float) -> WatchedClient | None:
        """Return who plays an episode that begins; None for one that is not watched."""
        client = digest(episode.client_key)
        known = self._known.get(client) if client else None
        if known is not None:
            known.newest = episode
            return known
        if len(self._due[0]) >= MAX_WATCHED:
            return None
        watched = WatchedClient(client, canary, part, now_s, episode)
        self._due[0].append(watched)
        if client:
            self._known[client] = watched
        return watched

    def settled(self, now_s: float) -> list[ClientReturn]:
        """Return what clients have earned whose time has come, in the order in which they began."""
        found = []
        for level, due in enumerate(self._due):
            while due and now_s - due[0].since_s >= self._ages_s[level]:
                watched = due.popleft()
                worth = watched.worth()
                if worth is not None:
                    found.append(self._return_of(watched, level, worth))
                self._go_on(watched, level + 1)
        return found

    def clear(self) -> None:
        """Forget all: another trial begins, or clients are assigned anew."""
        self._known.clear()
        for due in self._due:
            due.clear()

    def _return_of(self, watched: WatchedClient, level: int, worth: Worth) -> ClientReturn:
        return ClientReturn(
            client=watched.client,
            level=level,
            canary=watched.canary,
            part=watched.part,
            value=min(max(worth.value, self._low), self._high) if worth.rated is None else worth.value,
            rated=worth.rated,
        )

    def _go_on(self, watched: WatchedClient, level: int) -> None:
        """To its next level; one without a key is another one with its next episode."""
        if watched.client and level < LEVELS and len(self._due[level]) < MAX_WATCHED:
            self._due[level].append(watched)
        else:
            self._known.pop(watched.client, None)


def digest(client_key: str) -> str:
    """Return the name under which servers share what they know of a client; "" for one without a key."""
    return sha256(client_key.encode("utf-8", "surrogatepass")).hexdigest()[:16] if client_key else ""


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
        self.bounds = section
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
