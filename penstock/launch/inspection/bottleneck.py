"""The stage of a run that limits its pace: one pure judgement of measured figures.

A stage that waits points at the one it waits for: a learner that waits for experience at the actors, actors
that wait for credit at the learner, actors that wait for acknowledgements at the broker. A stage that makes
no progress at all comes before all shares, since its share of time cannot be measured.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WAITS: Final = 0.2
"""Share of waiting below which there is no bottleneck."""
_CLEARLY: Final = 2.0
"""Of two stages that wait for one another, the one that waits this much longer is the one kept waiting."""


class Bound(StrEnum):
    """The stage that limits the pace."""

    ACTOR = "actor-bound"
    LEARNER = "learner-bound"
    BROKER = "broker-bound"
    PACING = "pacing-bound"
    """Learner and actors wait for one another: the budget is too small for both to work at once."""
    BALANCED = "balanced"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements over a window. Shares are of time, 0 to 1; None: not measured.

    halted: why nothing is to be expected ("paused", "starting"), "" while the run should go on. Problems name
    the process that does not answer, is red or is gone. starved: actors that may not begin another fragment.
    """

    halted: str = ""
    broker_problem: str = ""
    learner_problem: str = ""
    actor_problem: str = ""
    actors: int = 0
    starved: int = 0
    updates: int | None = None
    since_update_s: float | None = None
    learner_wait_share: float | None = None
    credit_wait_share: float | None = None
    ack_wait_share: float | None = None
    ack_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limiting stage, and the figures behind it.

    stands_still: it makes no progress at all and needs attention.
    """

    bound: Bound
    reason: str
    stands_still: bool = False

    @property
    def line(self) -> str:
        """Return one line for people."""
        return f"{self.bound.value}: {self.reason}"


def judge(figures: Figures) -> Verdict:
    """Return the bottleneck."""
    if figures.halted:
        return Verdict(Bound.UNKNOWN, figures.halted)
    return _of_problems(figures) or _of_standstill(figures) or _of_waiting(figures)


def _of_problems(figures: Figures) -> Verdict | None:
    """Judge in the order in which a failure spreads: without its broker a healthy learner starves."""
    problems = (
        (Bound.BROKER, figures.broker_problem),
        (Bound.LEARNER, figures.learner_problem),
        (Bound.ACTOR, figures.actor_problem),
    )
    for bound, problem in problems:
        if problem:
            return Verdict(bound, "; ".join([problem, *_standing(figures)]), stands_still=True)
    return None


def _of_standstill(figures: Figures) -> Verdict | None:
    """Judge a window without an update, by whether the actors have credit."""
    if figures.updates != 0 or figures.actors == 0:
        return None
    if figures.starved == figures.actors:
        return Verdict(Bound.LEARNER, "; ".join(_standing(figures)))
    if figures.starved == 0 and not (figures.ack_wait_share or 0.0) >= WAITS:
        return Verdict(
            Bound.ACTOR, "; ".join([*_standing(figures), "actors have credit and fill no batch yet"])
        )
    return None


def _of_waiting(figures: Figures) -> Verdict:
    learner, credit, acks = (
        figures.learner_wait_share or 0.0,
        figures.credit_wait_share or 0.0,
        figures.ack_wait_share or 0.0,
    )
    measured = _shares(figures)
    if not measured:
        return Verdict(Bound.UNKNOWN, "nothing has been measured yet")
    return Verdict(_who(learner, credit, acks), ", ".join(measured))


def _who(learner: float, credit: float, acks: float) -> Bound:
    if acks >= WAITS and acks >= credit:
        return Bound.BROKER
    if max(learner, credit) < WAITS:
        return Bound.BALANCED
    if min(learner, credit) >= WAITS and max(learner, credit) < _CLEARLY * min(learner, credit):
        return Bound.PACING
    return Bound.ACTOR if learner > credit else Bound.LEARNER


def _standing(figures: Figures) -> list[str]:
    """Return in words which stages make no progress."""
    found = []
    if figures.since_update_s is not None and figures.updates == 0:
        found.append(f"no update for {figures.since_update_s:,.0f} s")
    elif figures.updates == 0:
        found.append("no update yet")
    if figures.actors and figures.starved:
        found.append(f"{figures.starved} of {figures.actors} actors wait for credit")
    return found


def _shares(figures: Figures) -> list[str]:
    found = []
    if figures.learner_wait_share is not None:
        found.append(f"the learner waits {figures.learner_wait_share:.0%} of its time for experience")
    if figures.credit_wait_share is not None:
        found.append(f"actors wait {figures.credit_wait_share:.0%} of their time for credit")
    if figures.ack_wait_share is not None:
        found.append(f"{figures.ack_wait_share:.0%} for acknowledgements")
    if found and figures.ack_s is not None:
        found.append(f"an acknowledgement takes {1000 * figures.ack_s:,.1f} ms")
    return found
