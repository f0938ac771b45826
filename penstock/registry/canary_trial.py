"""Is the canary worse than the active version? A judgement that all servers share and that never ends.

*Returns: one bet per client.* A client's arm is a hash of its key, so that a client is in the canary with the
chance p, whatever it is like. Let x be what the client earned by a fixed time after it began
(`ClientReturn`), r, s and u a reference, a scale and an average that are known before it is looked at, and

    w(x) = clip((r − x) / s, −1, 1)
    h = (w(x) − u) / (1 + |u|),        g = + h · min(p, 1 − p) / p         for a client of the canary
                                       g = − h · min(p, 1 − p) / (1 − p)   for one of the active version

Suppose that the canary equals the active version. Then x, when it is looked at, and which clients were looked
at before, do not depend on arms, and the arm of a client that was never looked at is independent of them all:
E[g | x, all before] = p · h·m/p − (1 − p) · h·m/(1 − p) = 0, with m = min(p, 1 − p), and |g| ≤ 1. So each bet
is fair, and `Evidence` bounds the chance that its capital ever reaches 1/α. Nothing is asked of the clients:
they may differ as they like, play as often as they like, be few or correlated. What would break it is a
second bet on the same client, whose arm is known by then: so a client counts once at each level, on all
servers together.
The same holds for a canary that is better for each client, whose bets only lose. r and s are median and
distance of the quartiles among the newest REFERENCE clients of both arms, u their mean of w: a few that
report nonsense move them little. Where w is 0 or 1 alone, as for thumbs, bets on w itself would be nothing
for most clients and all for the others; with u a drop is found with as few as half of the clients.

A level is a time: after `canary.settle_s`, 8 and 64 times that. It is fixed, so that neither an episode that
never ends nor one that ends early says when, or whether, it or another one counts.

*Failed and slow answers: one bet per window of requests of all clients.* An answer has failed where the
canary could not give it and the active version could to the same question: of versions that are alike none
has, whatever clients ask. The bet is fair where at most `error_margin` of answers fail. An answer is slow by
the time of its forward pass, compared among passes of at least its size, so that large requests are not the
canary's fault; the bet is fair where a pass of the canary is slow as often as one of the active version on
that machine, up to `slow_margin`. Answers that are no numbers withdraw at once. None of these ever ends.

*How often people rate: the same bet, on who said anything at all.* A canary after whose answers more people
speak has more opinions of both kinds, and its share of good ones among all conversations is higher by that
alone. While there is evidence of RATES_APART for a difference in how often people rate, no canary is called
better: `Cause.RATING_RATE`, and people decide. By chance there ever is that much with a probability of
1/RATES_APART, for each direction and level. It takes a verdict away and never makes one, so it is no part of
the sum below. Simulated, with half of the clients on each arm and half of what is rated liked: of 40 canaries
that are rated .8 of the time, and the active version .4, it keeps all from being called better.

Each question has its part of the false alarm rate (SHARES; that of returns is divided among the levels), so
the chance of any false verdict is at most their sum: `false_alarm`. WITHDRAW is final. Pure functions; the
state is small and goes to JSON.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from penstock.registry.bounds import LEVELS, Bounds, ClientReturn, Seen, Window
from penstock.registry.evidence import BETS, NONE, Evidence

REFERENCE: Final = 64
"""Newest clients whose median and quartiles are the reference."""
RATES_APART: Final = 20.0
"""Evidence for different rates of rating from which no canary is called better."""
BURN_IN: Final = 8
"""Clients of a level that are only a reference."""


class Verdict(StrEnum):
    """The decision about the canary."""

    GO_ON = "go_on"
    WITHDRAW = "withdraw"
    BETTER = "promote"
    """It has earned more; it is judged on, and only an operator promotes it. Registries store "promote"."""
    UNDECIDED = "undecided"
    """The horizon has come without proof for either; it is judged on, and its operator decides."""

    @property
    def text(self) -> str:
        """The verdict as an operator reads it."""
        return "better" if self is Verdict.BETTER else self.value


class Cause(StrEnum):
    """The observation on which a verdict rests."""

    LOWER_RETURN = "lower_return"
    ERRORS = "errors"
    LATENCY = "latency"
    NOT_FINITE = "not_finite"
    HIGHER_RETURN = "higher_return"
    HORIZON = "horizon"
    RATING_RATE = "rating_rate"
    """It has earned more, and people rate it more or less often."""


SHARES: Final = {
    Cause.LOWER_RETURN: 0.4,
    Cause.ERRORS: 0.2,
    Cause.LATENCY: 0.2,
    Cause.HIGHER_RETURN: 0.2,
}
"""Share of the false alarm rate of each question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Clients that were compared at one time after they began.

    recent: the newest values, oldest first. recent_rated: the newest shares of rated conversations.
    """

    canary: int = 0
    active: int = 0
    recent: tuple[float, ...] = ()
    lower: Evidence = NONE
    higher: Evidence = NONE
    recent_rated: tuple[float, ...] = ()
    rated_less: Evidence = NONE
    rated_more: Evidence = NONE


_EMPTY: Final = Level()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialState:
    """The whole state of a trial."""

    levels: tuple[Level, ...] = (_EMPTY,) * LEVELS
    errors: Evidence = NONE
    latency: Evidence = NONE
    answers: int = 0
    failed: int = 0
    not_finite: int = 0
    verdict: Verdict = Verdict.GO_ON
    cause: Cause | None = None
    """None as long as the verdict is to go on."""
    is_full: bool = False
    """Whether so many clients are known that no further ones are compared."""

    @property
    def compares_returns(self) -> bool:
        """Clients of both arms have earned something that could be compared."""
        first = self.levels[0]
        return min(first.canary, first.active) > 0 and first.lower.count > 0

    def progress(self, cause: Cause, false_alarm: float) -> float:
        """Return how much of the evidence that a verdict needs is there; 1: the verdict."""
        part = SHARES[cause] * false_alarm
        match cause:
            case Cause.ERRORS:
                return self.errors.value * part
            case Cause.LATENCY:
                return self.latency.value * part
            case Cause.LOWER_RETURN:
                return max(level.lower.value for level in self.levels) * part / LEVELS
        return max(level.higher.value for level in self.levels) * part / LEVELS

    @property
    def rates_differ(self) -> bool:
        """Return whether people seem to rate the canary more or less often than the active version."""
        return any(
            max(level.rated_less.value, level.rated_more.value) >= RATES_APART for level in self.levels
        )

    def explain(self) -> str:
        """Return one line for the audit."""
        first = self.levels[0]
        why = f" for {self.cause.value}" if self.cause else ""
        returns = max(level.lower.value for level in self.levels)
        return (
            f"{self.verdict.text}{why} after {first.canary} clients of the canary and {first.active} of the "
            f"active version, {self.answers} answers ({self.failed} failed, {self.not_finite} not finite; "
            f"evidence: lower_return {returns:.3g}, errors {self.errors.value:.3g}, "
            f"latency {self.latency.value:.3g})"
        )


def observe(state: TrialState, bounds: Bounds, seen: Seen) -> TrialState:
    """Return the state after a client's return, or a window of answers; nothing follows WITHDRAW.

    Args:
        state: the state so far.
        bounds: those of the trial.
        seen: a client that was not seen at its level before, or a window.
    """
    if state.verdict is Verdict.WITHDRAW:
        return state
    state = _compare(state, seen) if isinstance(seen, ClientReturn) else _count(state, bounds, seen)
    return _judge(state, bounds)


def observe_all(state: TrialState, bounds: Bounds, seen: Sequence[Seen]) -> TrialState:
    """Return the state after all of them, in order."""
    for one in seen:
        state = observe(state, bounds, one)
    return state


def _compare(state: TrialState, seen: ClientReturn) -> TrialState:
    level = state.levels[seen.level]
    gain = _gain(level.recent, seen.value, seen)
    if gain is not None:
        level = replace(level, lower=level.lower.bet(gain), higher=level.higher.bet(-gain))
    if seen.rated is not None:
        level = _compare_rates(level, seen.rated, seen)
    level = replace(
        level,
        canary=level.canary + seen.canary,
        active=level.active + (not seen.canary),
        recent=(*level.recent, seen.value)[-REFERENCE:],
    )
    levels = (*state.levels[: seen.level], level, *state.levels[seen.level + 1 :])
    return replace(state, levels=levels)


def _compare_rates(level: Level, rated: float, seen: ClientReturn) -> Level:
    gain = _gain(level.recent_rated, rated, seen)
    if gain is not None:
        less, more = level.rated_less.bet(gain), level.rated_more.bet(-gain)
        level = replace(level, rated_less=less, rated_more=more)
    return replace(level, recent_rated=(*level.recent_rated, rated)[-REFERENCE:])


def _gain(recent: tuple[float, ...], value: float, seen: ClientReturn) -> float | None:
    """Return what a bet on the canary's being lower gains; None where there is no bet."""
    worse = _worse(recent, value)
    if worse is None:
        return None
    least = min(seen.part, 1.0 - seen.part)
    return worse * least / seen.part if seen.canary else -worse * least / (1.0 - seen.part)


def _worse(recent: tuple[float, ...], value: float) -> float | None:
    """Return h: how much worse a value is than those before it; None while they are too few."""
    if len(recent) < BURN_IN:
        return None
    ordered, count = sorted(recent), len(recent)
    middle = ordered[count // 2]
    # Halved first: the distance of two floats may be no float.
    half = ordered[3 * count // 4] / 2 - ordered[count // 4] / 2
    usual = sum(_below(middle, half, each) for each in recent) / count
    return (_below(middle, half, value) - usual) / (1.0 + abs(usual))


def _below(middle: float, half: float, value: float) -> float:
    if half > 0.0:
        return min(1.0, max(-1.0, (middle / 2 - value / 2) / half))
    return float((value < middle) - (value > middle))


def _count(state: TrialState, bounds: Bounds, window: Window) -> TrialState:
    margin = bounds.error_margin
    errors = state.errors.bet((window.failed / window.answers - margin) / margin)
    latency = state.latency
    if window.slower is not None:
        latency = latency.bet((window.slower - bounds.slow_margin) / (1.0 + bounds.slow_margin))
    return replace(
        state,
        errors=errors,
        latency=latency,
        answers=state.answers + window.answers,
        failed=state.failed + window.failed,
        not_finite=state.not_finite + window.not_finite,
    )


def _judge(state: TrialState, bounds: Bounds) -> TrialState:
    if state.not_finite:
        return replace(state, verdict=Verdict.WITHDRAW, cause=Cause.NOT_FINITE)
    for cause in SHARES:
        if not _is_proved(state, bounds, cause):
            continue
        if cause is not Cause.HIGHER_RETURN:
            return replace(state, verdict=Verdict.WITHDRAW, cause=cause)
        if state.rates_differ:
            return replace(state, verdict=Verdict.UNDECIDED, cause=Cause.RATING_RATE)
        return replace(state, verdict=Verdict.BETTER, cause=cause)
    if state.verdict is Verdict.GO_ON and state.levels[0].canary >= bounds.horizon:
        return replace(state, verdict=Verdict.UNDECIDED, cause=Cause.HORIZON)
    return state


def _is_proved(state: TrialState, bounds: Bounds, cause: Cause) -> bool:
    return state.progress(cause, bounds.false_alarm) >= 1.0


# ---------------------------------------------------------------- as JSON


def to_json(state: TrialState) -> str:
    """Return the state as JSON text."""
    return json.dumps(asdict(state), allow_nan=False)


def from_json(text: str) -> TrialState:
    """Return the state of such a text; raises ValueError for a text that is no state of these BETS."""
    try:
        fields = json.loads(text)
        levels = tuple(_level(level) for level in fields["levels"])
        state = TrialState(
            **fields
            | {"levels": levels}
            | {name: _evidence(fields[name]) for name in ("errors", "latency")}
            | {"verdict": Verdict(fields["verdict"])}
            | {"cause": None if fields["cause"] is None else Cause(fields["cause"])},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"state of a canary's trial cannot be read ({error}): start the trial anew"
        ) from error
    if len(levels) != LEVELS or any(len(each.capital) != len(BETS) for each in _all_evidence(state)):
        raise ValueError("state of a canary's trial has other bets than this program: start the trial anew")
    return state


def _all_evidence(state: TrialState) -> Iterator[Evidence]:
    yield from (state.errors, state.latency)
    for level in state.levels:
        yield from (level.lower, level.higher, level.rated_less, level.rated_more)


def _evidence(fields: dict[str, Any]) -> Evidence:
    return Evidence(int(fields["count"]), tuple(map(float, fields["capital"])))


def _level(fields: dict[str, Any]) -> Level:
    # Registries of earlier releases hold no ratings.
    names = {"lower", "higher", "rated_less", "rated_more"} & fields.keys()
    evidence = {name: _evidence(fields[name]) for name in names}
    recent = {name: tuple(map(float, fields[name])) for name in {"recent", "recent_rated"} & fields.keys()}
    return Level(**fields | evidence | recent)
