"""The flow of fragments in figures: the rate at each stage between two observations, and the waits.

Counters are compared only within one process, so a restarted process counts from its second observation on.
A wait that has not ended is in no counter yet: an actor that made no step and has no credit for another
fragment has waited all the time, and so has a learner that made no update while an actor has credit.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import grpc

from penstock.config.credentials import credentials
from penstock.config.service_settings import calling_security
from penstock.config.settings import ConfigurationError
from penstock.launch.inspection.processes import (
    Observation,
    ProcessSnapshot,
    broker_of,
    observe,
    read_endpoints,
)
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.protocol.messages import Role, RunState
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime.exit import Fatal
from penstock.v1 import control_pb2, control_pb2_grpc

# ---- The stage of a run that limits its pace, as a pure function of measured figures.

WAITS: Final = 0.2
"""Share of waiting below which there is no bottleneck."""
_CLEARLY: Final = 2.0
"""Ratio of the waits of two stages from which on the stage that waits less is the bottleneck."""


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

    halted: why no progress is expected ("paused", "starting"), "" while there should be some. Problems name a
    process that does not answer, is unhealthy or has ended. starved: actors without credit for a fragment.
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
    measured = _shares(figures)
    if not measured:
        return Verdict(Bound.UNKNOWN, "nothing has been measured yet")
    learner, credit = figures.learner_wait_share or 0.0, figures.credit_wait_share or 0.0
    acks = figures.ack_wait_share or 0.0
    if acks >= WAITS and acks >= credit:
        bound = Bound.BROKER
    elif max(learner, credit) < WAITS:
        bound = Bound.BALANCED
    elif min(learner, credit) >= WAITS and max(learner, credit) < _CLEARLY * min(learner, credit):
        bound = Bound.PACING
    else:
        bound = Bound.ACTOR if learner > credit else Bound.LEARNER
    return Verdict(bound, ", ".join(measured))


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


Flow = Mapping[str, Any]
"""Rates per second and times in seconds, over `window_s`, and the present log. None: not measured."""


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
    return {
        "window_s": after.at_s - before.at_s,
        "environment_steps": actors.rate("environment_steps_total"),
        "episodes": actors.rate("episodes_total", evaluation="no"),
        "fragments_sent": actors.rate("fragments_acked_total"),
        "bytes_sent": actors.rate("fragment_sent_bytes_total"),
        "ack_s": actors.mean("ack_latency_seconds"),
        "fragments_appended": brokers.rate("fragments_appended_total"),
        "bytes_appended": brokers.rate("fragment_appended_bytes_total"),
        "append_s": brokers.mean("append_seconds"),
        "answers": Change(before, after, "server").rate("policy_answers_total"),
        "log_entries": status.log_entries if status else None,
        "log_bytes": status.log_bytes if status else None,
        "waiting_fragments": status.log_head - status.settled if status else None,
        "outstanding_steps": status.outstanding_steps if status else None,
        "budget_steps": status.budget_steps if status else None,
        "trained_steps": learners.rate("trained_steps_total"),
        "updates": learners.rate("updates_total"),
        "staleness": learners.mean("staleness_updates"),
        "versions": learners.rate("update_seconds_count", phase="publish"),
        "apply_s": actors.mean("weight_apply_seconds"),
        "version": status.latest.version if status else None,
    }


def figures_between(before: Observation, after: Observation) -> Figures:
    """Return the figures for the judgement of the bottleneck; of one observation alone, only the problems."""
    rollouts = [row for row in after.status.sessions if row.role == _ROLLOUT] if after.status else []
    starved = {row.actor_id for row in rollouts if row.sequence >= row.begin_through}
    since = after.learnt.update_at if after.learnt else None
    actors = after.of_role("actor")
    figures = Figures(
        halted=_halted(after),
        broker_problem=_problem(after, "broker", "redis") or after.silence,
        learner_problem=_problem(after, "learner"),
        # Only when no healthy actor is left: otherwise the others' waits are measured.
        actor_problem=_problem(after, "actor") if all(one.problem for one in actors) else "",
        actors=len(actors) or len({row.actor_id for row in rollouts}),
        starved=len(starved),
        since_update_s=max(0.0, after.wall_s - since) if since is not None else None,
    )
    if after.at_s <= before.at_s:
        return figures
    learner = Change(before, after, "learner")
    rise = learner.rise("updates_total")
    updates = round(rise) if rise is not None else _updates_written(before, after)
    return replace(
        figures,
        updates=updates,
        learner_wait_share=_learner_wait_share(learner, updates, is_fed=not starved),
        credit_wait_share=_wait_share(before, after, starved, "leave"),
        ack_wait_share=_wait_share(before, after, set(), "outbox"),
        ack_s=Change(before, after, "actor", "server").mean("ack_latency_seconds"),
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


def _updates_written(before: Observation, after: Observation) -> int | None:
    """Return the updates by the learner's lines, where its port does not answer."""
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


def _wait_share(before: Observation, after: Observation, names: set[str], cause: str) -> float | None:
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


def ask(
    address: str, credentials: Credentials, *, timeout_s: float = CALL_DEADLINE_S
) -> control_pb2.StatusReply:
    """Return the broker's reply; raises Fatal without one, ConfigurationError for a bad address."""
    try:
        with open_channel(address, credentials) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return stub.Status(control_pb2.StatusRequest(), timeout=timeout_s)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    except grpc.RpcError as error:
        raise Fatal(
            f"broker at {address} does not answer: {error.details()}; is the run still going?"
        ) from error


# ---- A line per role of a run: number of processes, rates, lag, weight version, health.

_ORDER: Final = ("actor", "server", "evaluator", "broker", "redis", "learner", "launcher")
_SESSION_ROLES: Final = {"actor": "rollout", "server": "server", "evaluator": "evaluation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """Texts for people. healthy, of: processes that are healthy, and all. problems: which are not and why."""

    role: str
    healthy: int
    of: int
    rate: str
    lag: str
    version: str
    restarts: int
    problems: tuple[str, ...] = ()


def role_rows(now: Observation, flow: Flow) -> list[RoleRow]:
    return [_row(role, now, flow) for role in _ORDER if now.of_role(role)]


def _row(role: str, now: Observation, flow: Flow) -> RoleRow:
    sights = now.of_role(role)
    return RoleRow(
        role=role,
        healthy=sum(not snapshot.problem for snapshot in sights),
        of=len(sights),
        rate=_RATES[role](flow) if role in _RATES else "",
        lag=_LAGS[role](flow) if role in _LAGS else _versions_behind(role, now),
        version=_version(role, now),
        restarts=round(sum(one.total("restarts_total", role=role) or 0.0 for one in now.of_role("launcher"))),
        problems=tuple(f"{snapshot.name} {snapshot.problem}" for snapshot in sights if snapshot.problem),
    )


def _per_second(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.0f} {unit}/s" if value >= 10 else f"{value:,.1f} {unit}/s"


_RATES: Final[dict[str, Callable[[Flow], str]]] = {
    "actor": lambda flow: _per_second(flow["environment_steps"], "steps"),
    "server": lambda flow: _per_second(flow["answers"], "answers"),
    "broker": lambda flow: _per_second(flow["fragments_appended"], "fragments"),
    "learner": lambda flow: _per_second(flow["updates"], "updates"),
}
_LAGS: Final[dict[str, Callable[[Flow], str]]] = {
    "broker": lambda flow: "" if flow["append_s"] is None else f"append {1000 * flow['append_s']:,.1f} ms",
    "learner": lambda flow: "" if flow["staleness"] is None else f"staleness {flow['staleness']:.1f} updates",
}


def _applied(role: str, now: Observation) -> list[int]:
    wanted = _SESSION_ROLES.get(role)
    rows = now.status.sessions if now.status else ()
    return [row.applied_version for row in rows if row.role == wanted and row.applied_version]


def _version(role: str, now: Observation) -> str:
    if role in ("broker", "learner"):
        return str(now.status.latest.version) if now.status else ""
    applied = _applied(role, now)
    if not applied:
        return ""
    return f"{min(applied)}" if min(applied) == max(applied) else f"{min(applied)} to {max(applied)}"


def _versions_behind(role: str, now: Observation) -> str:
    """Return the lag of a role's weights; "" for evaluators, which play the version that was requested."""
    applied = _applied(role, now) if role != "evaluator" else []
    if not applied or now.status is None:
        return ""
    worst = max(0, now.status.latest.version - min(applied))
    return f"{worst} version{'' if worst == 1 else 's'} behind"


WINDOW_S: Final = 5.0
"""Seconds over which rates and shares are means."""
MIN_INTERVAL_S: Final = 0.5
_FORGOTTEN_S: Final = 2 * WINDOW_S
"""Seconds without a look after which earlier observations are dropped."""
_DEADLINE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """An observation and its interpretation. Rates in `flow` are None in the first look."""

    now: Observation
    flow: Flow
    verdict: Verdict
    rows: list[RoleRow]

    def as_json(self) -> dict[str, Any]:
        return {
            "bottleneck": asdict(self.verdict),
            "roles": [asdict(row) for row in self.rows],
            "flow": self.flow,
        }


class Watch:
    """Observes the run of a folder repeatedly: the newest look is compared with one from seconds before.

    Safe to use from several threads; callers share a look that is younger than `MIN_INTERVAL_S`.
    """

    def __init__(self, run_dir: Path, config: Path | None = None, assignments: tuple[str, ...] = ()) -> None:
        """config, assignments: configuration with the credentials; default: the run's own."""
        self._run_dir = run_dir
        self._security = calling_security(run_dir, config, assignments)
        self._seen: deque[Observation] = deque()
        self._lock = threading.Lock()

    def look(self) -> RunSnapshot:
        with self._lock:
            age_s = time.monotonic() - self._seen[-1].at_s if self._seen else math.inf
            if age_s > _FORGOTTEN_S:
                self._seen.clear()
            if age_s >= MIN_INTERVAL_S:
                self._seen.append(observe(self._run_dir, self._status))
            while len(self._seen) > 2 and self._seen[1].at_s <= self._seen[-1].at_s - WINDOW_S:
                self._seen.popleft()
            before, now = comparable(self._seen), self._seen[-1]
        flow = flow_between(before, now)
        return RunSnapshot(
            now=now, flow=flow, verdict=judge(figures_between(before, now)), rows=role_rows(now, flow)
        )

    def _status(self) -> control_pb2.StatusReply:
        """Return the reply of the run's broker; raises Fatal when it has none yet or does not answer."""
        address = broker_of(read_endpoints(self._run_dir))
        if not address:
            raise Fatal("no broker has come up yet")
        return ask(address, credentials(self._security), timeout_s=_DEADLINE_S)


def comparable(seen: Sequence[Observation]) -> Observation:
    """Return the oldest observation with an answer of all that answer in the newest, else the oldest."""
    answering = _answering(seen[-1])
    whole = (one for one in seen if one is not seen[-1] and answering <= _answering(one))
    return next(whole, seen[0])


def _answering(observation: Observation) -> set[tuple[str, int]]:
    return {(snapshot.name, snapshot.pid) for snapshot in observation.sights if snapshot.samples}
