"""Observe one run repeatedly, comparing the newest observation with one from some seconds before.

Safe to use from several threads; callers share a look that is younger than `MIN_INTERVAL_S`.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from penstock.config.credentials import credentials
from penstock.config.service_settings import calling_security
from penstock.config.settings import ConfigurationError
from penstock.launch.inspection.flow import Flow, Verdict, figures_between, flow_between, judge
from penstock.launch.inspection.processes import (
    Ask,
    Observation,
    ProcessSnapshot,
    broker_of,
    observe,
    read_endpoints,
)
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime.exit import Fatal
from penstock.v1 import control_pb2, control_pb2_grpc

# ---- The one call behind `penstock status`: ask a broker for the status of its run.


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
    found = {snapshot.role for snapshot in now.sights}
    return [_row(role, now, flow) for role in _ORDER if role in found]


def _row(role: str, now: Observation, flow: Flow) -> RoleRow:
    sights = now.of_role(role)
    return RoleRow(
        role=role,
        healthy=sum(not snapshot.problem for snapshot in sights),
        of=len(sights),
        rate=_RATES[role](flow) if role in _RATES else "",
        lag=_LAGS[role](flow) if role in _LAGS else _versions_behind(role, now),
        version=_version(role, now),
        restarts=_restarts(role, now.of_role("launcher")),
        problems=tuple(f"{snapshot.name} {snapshot.problem}" for snapshot in sights if snapshot.problem),
    )


def _per_second(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.0f} {unit}/s" if value >= 10 else f"{value:,.1f} {unit}/s"


def _milliseconds(value: float | None, what: str) -> str:
    return "" if value is None else f"{what} {1000 * value:,.1f} ms"


_RATES: Final[dict[str, Callable[[Flow], str]]] = {
    "actor": lambda flow: _per_second(flow.environment_steps, "steps"),
    "server": lambda flow: _per_second(flow.answers, "answers"),
    "broker": lambda flow: _per_second(flow.fragments_appended, "fragments"),
    "learner": lambda flow: _per_second(flow.updates, "updates"),
}
_LAGS: Final[dict[str, Callable[[Flow], str]]] = {
    "broker": lambda flow: _milliseconds(flow.append_s, "append"),
    "learner": lambda flow: "" if flow.staleness is None else f"staleness {flow.staleness:.1f} updates",
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
    """An evaluator plays the version that it was asked for, and lags behind none."""
    applied = _applied(role, now) if role != "evaluator" else []
    if not applied or now.status is None:
        return ""
    worst = max(0, now.status.latest.version - min(applied))
    return f"{worst} version{'' if worst == 1 else 's'} behind"


def _restarts(role: str, launchers: tuple[ProcessSnapshot, ...]) -> int:
    return round(sum(snapshot.total("restarts_total", role=role) or 0.0 for snapshot in launchers))


WINDOW_S: Final = 5.0
"""Seconds over which rates and shares are means."""
MIN_INTERVAL_S: Final = 0.5
_FORGOTTEN_S: Final = 2 * WINDOW_S
"""Seconds of pause after which earlier observations are dropped."""
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
            "flow": asdict(self.flow),
        }


class Watch:
    """A run under observation."""

    def __init__(self, run_dir: Path, ask_broker: Ask) -> None:
        self._run_dir, self._ask = run_dir, ask_broker
        self._seen: deque[Observation] = deque()
        self._lock = threading.Lock()

    def look(self) -> RunSnapshot:
        with self._lock:
            age_s = time.monotonic() - self._seen[-1].at_s if self._seen else math.inf
            if age_s > _FORGOTTEN_S:
                self._seen.clear()
            if age_s >= MIN_INTERVAL_S:
                self._seen.append(observe(self._run_dir, self._ask))
            while len(self._seen) > 2 and self._seen[1].at_s <= self._seen[-1].at_s - WINDOW_S:
                self._seen.popleft()
            before, now = comparable(self._seen), self._seen[-1]
        flow = flow_between(before, now)
        return RunSnapshot(
            now=now, flow=flow, verdict=judge(figures_between(before, now)), rows=role_rows(now, flow)
        )


def comparable(seen: Sequence[Observation]) -> Observation:
    """Return the oldest observation with an answer of all who answer in the newest, else the oldest."""
    answering = _answering(seen[-1])
    whole = (one for one in seen if one is not seen[-1] and answering <= _answering(one))
    return next(whole, seen[0])


def _answering(observation: Observation) -> set[tuple[str, int]]:
    return {(snapshot.name, snapshot.pid) for snapshot in observation.sights if snapshot.samples}


def watch_folder(run_dir: Path, config: Path | None = None, assignments: tuple[str, ...] = ()) -> Watch:
    """Watch the run of a folder, with the credentials that `config` names (default: the run's own)."""
    security = calling_security(run_dir, config, assignments)
    return Watch(run_dir, lambda: ask_folder(run_dir, credentials(security)))


def ask_folder(run_dir: Path, said: Credentials) -> control_pb2.StatusReply:
    """Return the reply of the broker of a run; raises Fatal when it has none yet or does not answer."""
    address = broker_of(read_endpoints(run_dir))
    if not address:
        raise Fatal("no broker has come up yet")
    return ask(address, said, timeout_s=_DEADLINE_S)
