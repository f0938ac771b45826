"""The way of a fragment in figures: the rate at each hop between two observations, and the waits.

Counters are compared only within one process, so a process that was started again counts from its second
observation on. A wait that has not ended is in no counter yet: an actor that made no step and may not begin
another fragment has waited all the time, and so has a learner that made no update while an actor may go on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from penstock.launch.inspection.processes import Observation, ProcessSnapshot
from penstock.protocol.messages import Role, RunState

# ---- The stage of a run that limits its pace: one pure judgement of measured figures.

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
    """The limiting stage and why. stands_still: the run makes no progress at all and needs attention."""

    bound: Bound
    reason: str
    stands_still: bool = False

    @property
    def line(self) -> str:
        return f"{self.bound.value}: {self.reason}"


def judge(figures: Figures) -> Verdict:
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


_ROLLOUT: Final = Role.ROLLOUT.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Rates per second, times in seconds, both over `window_s`; the log as it is now. None: not measured."""

    window_s: float
    environment_steps: float | None = None
    episodes: float | None = None
    fragments_sent: float | None = None
    bytes_sent: float | None = None
    ack_s: float | None = None
    fragments_appended: float | None = None
    bytes_appended: float | None = None
    append_s: float | None = None
    answers: float | None = None
    log_entries: int | None = None
    log_bytes: int | None = None
    waiting_fragments: int | None = None
    outstanding_steps: int | None = None
    budget_steps: int | None = None
    trained_steps: float | None = None
    updates: float | None = None
    staleness: float | None = None
    versions: float | None = None
    apply_s: float | None = None
    version: int | None = None


class Change:
    """The change of counters of processes of some roles between two observations."""

    def __init__(self, before: Observation, after: Observation, *roles: str) -> None:
        known = {(snapshot.name, snapshot.pid): snapshot for snapshot in before.of_role(*roles)}
        self.pairs = [
            (known[snapshot.name, snapshot.pid], snapshot)
            for snapshot in after.of_role(*roles)
            if (snapshot.name, snapshot.pid) in known
            and snapshot.samples
            and known[snapshot.name, snapshot.pid].samples
        ]

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the rise per second, summed over the processes."""
        return _sum(
            rise / (now.at_s - then.at_s)
            for then, now in self.pairs
            if now.at_s > then.at_s and (rise := _rise(then, now, name, **labels)) is not None
        )

    def rise(self, name: str, **labels: str) -> float | None:
        return _sum(
            rise for then, now in self.pairs if (rise := _rise(then, now, name, **labels)) is not None
        )

    def mean(self, name: str) -> float | None:
        """Return the mean of the new values of a histogram or summary."""
        count, total = self.rise(f"{name}_count"), self.rise(f"{name}_sum")
        return total / count if count and total is not None else None


def flow_between(before: Observation, after: Observation) -> Flow:
    actors, brokers = Change(before, after, "actor", "server"), Change(before, after, "broker")
    learners, status = Change(before, after, "learner"), after.status
    return Flow(
        window_s=after.at_s - before.at_s,
        environment_steps=actors.rate("environment_steps_total"),
        episodes=actors.rate("episodes_total", evaluation="no"),
        fragments_sent=actors.rate("fragments_acked_total"),
        bytes_sent=actors.rate("fragment_sent_bytes_total"),
        ack_s=actors.mean("ack_latency_seconds"),
        fragments_appended=brokers.rate("fragments_appended_total"),
        bytes_appended=brokers.rate("fragment_appended_bytes_total"),
        append_s=brokers.mean("append_seconds"),
        answers=Change(before, after, "server").rate("policy_answers_total"),
        log_entries=status.log_entries if status else None,
        log_bytes=status.log_bytes if status else None,
        waiting_fragments=status.log_head - status.settled if status else None,
        outstanding_steps=status.outstanding_steps if status else None,
        budget_steps=status.budget_steps if status else None,
        trained_steps=learners.rate("trained_steps_total"),
        updates=learners.rate("updates_total"),
        staleness=learners.mean("staleness_updates"),
        versions=learners.rate("update_seconds_count", phase="publish"),
        apply_s=actors.mean("weight_apply_seconds"),
        version=status.latest.version if status else None,
    )


def figures_between(before: Observation, after: Observation) -> Figures:
    """Return the figures for the judgement of the bottleneck; of one observation alone, only the problems."""
    names = starved(after)
    since = after.learnt.update_at if after.learnt else None
    standing = Figures(
        halted=_halted(after),
        broker_problem=_problem(after, "broker", "redis") or after.silence,
        learner_problem=_problem(after, "learner"),
        actor_problem=_actor_problem(after),
        actors=len(after.of_role("actor")) or len(rollout_actors(after)),
        starved=len(names),
        since_update_s=max(0.0, after.wall_s - since) if since is not None else None,
    )
    return _measured(standing, before, after, names) if after.at_s > before.at_s else standing


def _measured(standing: Figures, before: Observation, after: Observation, names: frozenset[str]) -> Figures:
    learner = Change(before, after, "learner")
    rise = learner.rise("updates_total")
    updates = round(rise) if rise is not None else _updates_written(before, after)
    return replace(
        standing,
        updates=updates,
        learner_wait_share=_learner_wait_share(learner, updates, is_fed=not names),
        credit_wait_share=_wait_share(before, after, names, "leave"),
        ack_wait_share=_wait_share(before, after, frozenset(), "outbox"),
        ack_s=Change(before, after, "actor", "server").mean("ack_latency_seconds"),
    )


def rollout_actors(observation: Observation) -> frozenset[str]:
    """Return the ids of the actors with an open session that generate experience at their own pace."""
    rows = observation.status.sessions if observation.status else ()
    return frozenset(row.actor_id for row in rows if row.role == _ROLLOUT)


def starved(observation: Observation) -> frozenset[str]:
    """Return those of them that have used all their credit."""
    rows = observation.status.sessions if observation.status else ()
    return frozenset(
        row.actor_id for row in rows if row.role == _ROLLOUT and row.sequence >= row.begin_through
    )


def _halted(after: Observation) -> str:
    status = after.status
    desired = RunState(status.desired) if status is not None and status.desired else RunState.RUNNING
    if desired is not RunState.RUNNING:
        return "paused by an operator" if desired is RunState.PAUSED else "the run is ending"
    for role in ("broker", "learner"):
        if not after.of_role(role) and status is None:
            return f"no {role} has come up yet"
    return ""


def _problem(after: Observation, *roles: str) -> str:
    found = [f"{snapshot.name} {snapshot.problem}" for snapshot in after.of_role(*roles) if snapshot.problem]
    return "; ".join(found)


def _actor_problem(after: Observation) -> str:
    """Return a problem only when no working actor is left: the others' share is measured."""
    actors = after.of_role("actor")
    return _problem(after, "actor") if actors and all(snapshot.problem for snapshot in actors) else ""


def _updates_written(before: Observation, after: Observation) -> int | None:
    """Return the updates by the learner's lines, where its port is silent."""
    if before.learnt is None or after.learnt is None:
        return None
    return max(0, int(after.learnt.row.get("updates", 0)) - int(before.learnt.row.get("updates", 0)))


def _learner_wait_share(learner: Change, updates: int | None, *, is_fed: bool) -> float | None:
    waited = learner.rise("update_seconds_sum", phase="wait")
    computed = learner.rise("update_seconds_sum", phase="compute")
    if waited is None or computed is None:
        return None
    if updates == 0 or waited + computed == 0:
        return 1.0 if is_fed else 0.0
    return waited / (waited + computed)


def _wait_share(before: Observation, after: Observation, names: frozenset[str], cause: str) -> float | None:
    """Return the mean over the actors of the share of the window that each waited for `cause`."""
    shares = []
    for then, now in Change(before, after, "actor").pairs:
        window_s, waited = now.at_s - then.at_s, _rise(then, now, "actor_wait_seconds_total", cause=cause)
        stood = not _rise(then, now, "environment_steps_total")
        whole = now.name in names and stood
        shares.append(1.0 if whole else min(1.0, (waited or 0.0) / window_s))
    return sum(shares) / len(shares) if shares else None


def _rise(then: ProcessSnapshot, now: ProcessSnapshot, name: str, **labels: str) -> float | None:
    old, new = then.total(name, **labels), now.total(name, **labels)
    return None if new is None else max(0.0, new - (old or 0.0))


def _sum(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) if found else None
