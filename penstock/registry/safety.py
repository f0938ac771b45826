"""Is the canary worse than the active version? A test that may be looked at after every episode.

Episodes of both arms are paired as they come, and each pair is a fair bet against "the canary is no worse":

    W_n = mean over λ of ∏ (1 + λ·(x_i − m)),  i = 1..n,  W_0 = 1,  x_i in [−1, 1], λ from BETS / (1 + m)

where x_i is how much worse the canary did (return as a part of its range, share of failed or slow answers)
and m the margin that is forgiven. This is the capital process of Waudby-Smith and Ramdas, "Estimating means
of bounded random variables by betting", J. R. Stat. Soc. B 86 (2024), section 4, with a mixture of constant
bets. While the canary is no worse, E[x_i | past] ≤ m makes W a non-negative supermartingale, and by Ville's
inequality the chance that it *ever* reaches 1/α is at most α, however often one looks and whenever one stops.

Four such processes share the false alarm rate (SHARES): return lower, errors more frequent, slow answers more
frequent → WITHDRAW; return higher → PROMOTE. Answers that are not finite are no matter of chance: more than
`max_not_finite` withdraw at once. A verdict comes within `horizon` episodes of the canary: UNDECIDED at the
latest.

What the caller owes: outcomes of an arm come in the order in which their episodes *began* (`cohort`; those
that end first are the short ones), none is left out for how it went, and clients are assigned by hash, not by
what they are. Then what holds for a pair holds given all before it. Returns outside their range are clipped
to it, which keeps the false alarm rate and may hide what lies beyond. Pure functions; the state is small and
goes to JSON.
"""

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Final

from penstock.registry.bounds import MAX_WAITING, Bounds, Outcome

BETS: Final = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Below 1: no single pair ruins a process."""


class Verdict(StrEnum):
    """The decision about the canary."""

    GO_ON = "go_on"
    WITHDRAW = "withdraw"
    PROMOTE = "promote"
    UNDECIDED = "undecided"
    """The horizon has come without proof for either: the decision is left to the canary's operator."""


class Cause(StrEnum):
    """The observation on which a verdict rests."""

    LOWER_RETURN = "lower_return"
    ERRORS = "errors"
    LATENCY = "latency"
    NOT_FINITE = "not_finite"
    HIGHER_RETURN = "higher_return"
    HORIZON = "horizon"


SHARES: Final = {
    Cause.LOWER_RETURN: 0.4,
    Cause.ERRORS: 0.2,
    Cause.LATENCY: 0.2,
    Cause.HIGHER_RETURN: 0.2,
}
"""Share of the false alarm rate of each process, in the order of `State.wealth`."""


Sample = tuple[float | None, float, float]
"""Return as a part of its range, share of failed answers, share of slow answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The whole state of the test."""

    canary_episodes: int = 0
    active_episodes: int = 0
    pairs: int = 0
    not_finite: int = 0
    waiting_canary: tuple[Sample, ...] = ()
    waiting_active: tuple[Sample, ...] = ()
    wealth: tuple[tuple[float, ...], ...] = ((1.0,) * len(BETS),) * len(SHARES)
    """[process, bet], in the order of SHARES and BETS."""
    verdict: Verdict = Verdict.GO_ON
    cause: Cause | None = None
    """None as long as the verdict is to go on."""

    def evidence(self, cause: Cause) -> float:
        """Return W_n of one process: against 1, how strongly the pairs speak for it."""
        bets = self.wealth[list(SHARES).index(cause)]
        return sum(bets) / len(bets)

    def explain(self) -> str:
        """Return one line for the audit."""
        said = ", ".join(f"{cause.value} {self.evidence(cause):.3g}" for cause in SHARES)
        why = f" for {self.cause.value}" if self.cause else ""
        return (
            f"{self.verdict.value}{why} after {self.canary_episodes} episodes of the canary "
            f"({self.pairs} compared, {self.not_finite} answers not finite; evidence: {said})"
        )


def observe(state: State, bounds: Bounds, outcome: Outcome, *, canary: bool) -> State:
    """Return the state after one more episode; a verdict is final.

    Args:
        state: the state so far.
        bounds: those of the test, the same for all its episodes.
        outcome: of the episode; those of an arm come in the order in which their episodes began.
        canary: whether it is the canary's episode, else the active version's.
    """
    if state.verdict is not Verdict.GO_ON:
        return state
    sample = _sample(bounds, outcome)
    if canary:
        state = replace(
            state,
            canary_episodes=state.canary_episodes + 1,
            not_finite=state.not_finite + outcome.not_finite,
            waiting_canary=(*state.waiting_canary, sample)[-MAX_WAITING:],
        )
    else:
        waiting = (*state.waiting_active, sample)[-MAX_WAITING:]
        state = replace(state, active_episodes=state.active_episodes + 1, waiting_active=waiting)
    if not state.waiting_canary:
        return state  # nothing to compare: most episodes, where the canary's share is small
    return _judge(_compare(state, bounds), bounds)


def to_json(state: State) -> str:
    """Return the state as JSON text."""
    return json.dumps(asdict(state), allow_nan=False)


def from_json(text: str) -> State:
    """Return the state of such a text; raises ValueError for a text that is no state of these BETS."""
    try:
        fields = json.loads(text)
        wealth = tuple(tuple(map(float, bets)) for bets in fields.pop("wealth"))
        state = State(
            **fields
            | {name: tuple(map(tuple, fields[name])) for name in ("waiting_canary", "waiting_active")}
            | {"verdict": Verdict(fields["verdict"])}
            | {"cause": None if fields["cause"] is None else Cause(fields["cause"])},
            wealth=wealth,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"state of a canary's test cannot be read ({error}): start the test anew") from error
    if [len(bets) for bets in wealth] != [len(BETS)] * len(SHARES):
        raise ValueError("state of a canary's test has other bets than this program: start the test anew")
    return state


def _sample(bounds: Bounds, outcome: Outcome) -> Sample:
    answers = max(outcome.answers, 1)
    part = None
    if outcome.total_return is not None:
        clipped = min(max(outcome.total_return, bounds.low), bounds.high)
        part = (clipped - bounds.low) / (bounds.high - bounds.low)
    return part, outcome.errors / answers, outcome.slow / answers


def _compare(state: State, bounds: Bounds) -> State:
    """Pair the episode that waits longest with the freshest of the other arm, if there are enough."""
    count = bounds.active_per_canary
    if not state.waiting_canary or len(state.waiting_active) < count:
        return state
    canary, active = state.waiting_canary[0], state.waiting_active[-count:]
    margins = (
        bounds.return_margin / (bounds.high - bounds.low),
        bounds.error_margin,
        bounds.slow_margin,
        0.0,
    )
    worse = _differences(canary, active)
    return replace(
        state,
        pairs=state.pairs + 1,
        waiting_canary=state.waiting_canary[1:],
        waiting_active=state.waiting_active[:-count],
        wealth=tuple(map(_bet, state.wealth, worse, margins)),
    )


def _differences(canary: Sample, active: tuple[Sample, ...]) -> tuple[float | None, ...]:
    """Return x of each process in the order of SHARES; None where either side's return is not known."""
    count = len(active)
    errors = canary[1] - sum(sample[1] for sample in active) / count
    slow = canary[2] - sum(sample[2] for sample in active) / count
    returns = [sample[0] for sample in active if sample[0] is not None]
    if canary[0] is None or len(returns) < count:
        return None, errors, slow, None
    lower = sum(returns) / count - canary[0]
    return lower, errors, slow, -lower


def _bet(wealth: tuple[float, ...], worse: float | None, margin: float) -> tuple[float, ...]:
    """Return `wealth` after one more factor of W for each bet."""
    if worse is None:
        return wealth
    gain = (worse - margin) / (1.0 + margin)
    return tuple(own * (1.0 + bet * gain) for own, bet in zip(wealth, BETS, strict=True))


def _judge(state: State, bounds: Bounds) -> State:
    if state.not_finite > bounds.max_not_finite:
        return replace(state, verdict=Verdict.WITHDRAW, cause=Cause.NOT_FINITE)
    for (cause, share), wealth in zip(SHARES.items(), state.wealth, strict=True):
        if sum(wealth) / len(BETS) >= 1.0 / (share * bounds.false_alarm):
            verdict = Verdict.PROMOTE if cause is Cause.HIGHER_RETURN else Verdict.WITHDRAW
            return replace(state, verdict=verdict, cause=cause)
    if state.canary_episodes >= bounds.horizon:
        return replace(state, verdict=Verdict.UNDECIDED, cause=Cause.HORIZON)
    return state
