"""The statistics of a canary: returns of its clients, and when they are evidence against it."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

from penstock.config.sections import CanarySection
from penstock.registry.routing import Arms

# ---- Bounds, and the observations of servers by which a canary is judged.

MAX_PART: Final = 0.8
"""Largest part of the compared clients on the canary: with fewer others a verdict takes too long."""
LEVELS: Final = 3
"""Number of times at which a client is compared: after `settle_s`, 8 and 64 times that."""
LEVEL_FACTOR: Final = 8


ERROR_MARGIN: Final = 0.005
"""Tolerated share of the canary's answers that fail where the active version can answer."""
SLOW_MARGIN: Final = 0.05
"""Tolerated rise in the share of slow answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReturn:
    """The return of one client by a certain time after its first episode in the trial began."""

    client: str
    """Digest of its key, the same on all servers; "": no key, so that each episode draws an arm."""
    level: int
    """Index of the time, below LEVELS."""
    canary: bool
    part: float
    """Probability with which the client was assigned to the canary instead of the active version."""
    value: float
    """Mean return of its complete episodes, or else the return so far of an open one.

    For a person with opinions: the share of all their conversations that they liked.
    """
    rated: float | None = None
    """Share of conversations with an opinion; None: the client has returns and no opinions."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value={self.value}: must be finite; refuse the reward that was not")
        if self.rated is not None and not 0.0 <= self.rated <= 1.0:
            raise ValueError(f"rated={self.rated}: must be between 0 and 1")
        if not 0.0 < self.part < 1.0:
            raise ValueError(f"part={self.part}: must lie between 0 and 1")
        if not 0 <= self.level < LEVELS:
            raise ValueError(f"level={self.level}: must be below {LEVELS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The canary's answers to all clients in a few seconds on one server."""

    answers: int
    failed: int = 0
    """Answers that it could not give where the active version could."""
    not_finite: int = 0
    """Failed answers whose action, log-probability or value was not finite."""
    slower: float | None = None
    """Its share of slow answers less that of the active version, in [−1, 1]; None: not comparable."""

    def __post_init__(self) -> None:
        if not 0 <= self.not_finite <= self.failed <= self.answers or self.answers < 1:
            raise ValueError(
                f"answers={self.answers}, failed={self.failed}, not_finite={self.not_finite}: "
                "must not rise from one to the next"
            )
        if self.slower is not None and not -1.0 <= self.slower <= 1.0:
            raise ValueError(f"slower={self.slower}: must be between -1 and 1")


Seen = ClientReturn | Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The identity of a trial: what is compared."""

    canary: int
    active: int
    experiment: str
    latest_share: float

    @classmethod
    def of(cls, arms: Arms) -> Self | None:
        """Return the running trial; None without a canary, or without others to compare it with."""
        traffic = arms.traffic
        if arms.canary is None or arms.active is None:
            return None
        trial = cls(
            canary=arms.canary,
            active=arms.active,
            experiment=traffic.experiment,
            latest_share=traffic.latest_share,
        )
        return trial if 0.0 < trial.part_of(traffic.canary_share) < 1.0 else None

    def part_of(self, canary_share: float) -> float:
        """Return the probability of the canary for a client of the canary or the active version."""
        rest = 1.0 - self.latest_share
        return canary_share / rest if rest > 0.0 else 0.0

    def __str__(self) -> str:
        return f"{self.canary} {self.active} {self.experiment} {self.latest_share!r}"


# ---- Evidence that is valid at any time: an e-process.

BETS: Final = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Fractions of the capital that are bet; below 1: no single loss takes all of it."""
_MOST: Final = 1e300
"""Upper limit of the capital, which only makes the test more conservative."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The capital of one question. count: number of bets. capital: for each of BETS."""

    count: int = 0
    capital: tuple[float, ...] = (0.0,) * len(BETS)

    @property
    def value(self) -> float:
        """M_t: 1 at the start; under the null hypothesis it ever reaches x with probability at most 1/x."""
        return sum(self.capital) / len(BETS) + 1.0 / (self.count + 1)

    def bet(self, gain: float) -> "Evidence":
        """Return the evidence after one more bet; raises ValueError for a gain below −1."""
        if not gain >= -1.0:
            raise ValueError(f"gain={gain}: must be a number of at least -1")
        count = self.count + 1
        start = 1.0 / (count * (count + 1))
        bets = zip(self.capital, BETS, strict=True)
        return Evidence(count, tuple(min(_MOST, (own + start) * (1.0 + bet * gain)) for own, bet in bets))


NONE: Final = Evidence()
"""Evidence before the first bet."""


REFERENCE: Final = 64
"""Number of newest clients whose median and quartiles are the reference."""
RATES_APART: Final = 20.0
"""Evidence for different rates of rating from which on no canary is called better."""
BURN_IN: Final = 8
"""Number of first clients of a level that serve only as a reference."""


class Verdict(StrEnum):
    """The decision about the canary."""

    GO_ON = "go_on"
    WITHDRAW = "withdraw"
    BETTER = "promote"
    """It earns more; it stays under judgement, and only an operator promotes it. Stored as "promote"."""
    UNDECIDED = "undecided"
    """The horizon is reached without a verdict; it stays under judgement, and an operator decides."""

    @property
    def text(self) -> str:
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
    """It earns more, but people rate it more or less often than the active version."""


SHARES: Final = {
    Cause.LOWER_RETURN: 0.4,
    Cause.ERRORS: 0.2,
    Cause.LATENCY: 0.2,
    Cause.HIGHER_RETURN: 0.2,
}
"""Share of the false alarm rate of each question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Clients that were compared at one of the LEVELS.

    canary, active: their numbers. recent: the newest values, oldest first. recent_rated: the newest shares of
    rated conversations.
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
    """None while the verdict is GO_ON."""
    is_full: bool = False
    """Whether no further clients are compared, because too many are stored."""

    @property
    def compares_returns(self) -> bool:
        first = self.levels[0]
        return min(first.canary, first.active) > 0 and first.lower.count > 0

    def progress(self, cause: Cause, false_alarm: float) -> float:
        """Return the evidence as a share of what a verdict needs; 1: the verdict."""
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
        return any(
            max(level.rated_less.value, level.rated_more.value) >= RATES_APART for level in self.levels
        )

    def explain(self) -> str:
        first = self.levels[0]
        why = f" for {self.cause.value}" if self.cause else ""
        returns = max(level.lower.value for level in self.levels)
        return (
            f"{self.verdict.text}{why} after {first.canary} clients of the canary and {first.active} of the "
            f"active version, {self.answers} answers ({self.failed} failed, {self.not_finite} not finite; "
            f"evidence: lower_return {returns:.3g}, errors {self.errors.value:.3g}, "
            f"latency {self.latency.value:.3g})"
        )


def observe(state: TrialState, bounds: CanarySection, seen: Seen) -> TrialState:
    """Return the state after an observation; WITHDRAW is final."""
    if state.verdict is Verdict.WITHDRAW:
        return state
    state = _compare(state, seen) if isinstance(seen, ClientReturn) else _count(state, seen)
    return _judge(state, bounds)


def observe_all(state: TrialState, bounds: CanarySection, seen: Sequence[Seen]) -> TrialState:
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
    """Return the gain of a bet that the canary earns less; None: too few clients for a bet."""
    worse = _worse(recent, value)
    if worse is None:
        return None
    least = min(seen.part, 1.0 - seen.part)
    return worse * least / seen.part if seen.canary else -worse * least / (1.0 - seen.part)


def _worse(recent: tuple[float, ...], value: float) -> float | None:
    """Return how much worse a value is than those before it; None while they are too few."""
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


def _count(state: TrialState, window: Window) -> TrialState:
    errors = state.errors.bet((window.failed / window.answers - ERROR_MARGIN) / ERROR_MARGIN)
    latency = state.latency
    if window.slower is not None:
        latency = latency.bet((window.slower - SLOW_MARGIN) / (1.0 + SLOW_MARGIN))
    return replace(
        state,
        errors=errors,
        latency=latency,
        answers=state.answers + window.answers,
        failed=state.failed + window.failed,
        not_finite=state.not_finite + window.not_finite,
    )


def _judge(state: TrialState, bounds: CanarySection) -> TrialState:
    if state.not_finite:
        return replace(state, verdict=Verdict.WITHDRAW, cause=Cause.NOT_FINITE)
    for cause in SHARES:
        if state.progress(cause, bounds.false_alarm) < 1.0:
            continue
        if cause is not Cause.HIGHER_RETURN:
            return replace(state, verdict=Verdict.WITHDRAW, cause=cause)
        if state.rates_differ:
            return replace(state, verdict=Verdict.UNDECIDED, cause=Cause.RATING_RATE)
        return replace(state, verdict=Verdict.BETTER, cause=cause)
    if state.verdict is Verdict.GO_ON and state.levels[0].canary >= bounds.horizon:
        return replace(state, verdict=Verdict.UNDECIDED, cause=Cause.HORIZON)
    return state


# ---- A state as JSON.


def to_json(state: TrialState) -> str:
    return json.dumps(asdict(state), allow_nan=False)


def from_json(text: str) -> TrialState:
    """Return the state in a text; raises ValueError for any other text, and for other BETS."""
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


# ---- Confidence interval of a share.

_Z: Final = 1.959964
"""Quantile of the normal distribution for a 95 % interval."""


def wilson_interval(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of the share `count` / `of` (Wilson 1927)."""
    share, spread = count / of, _Z**2 / of
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
