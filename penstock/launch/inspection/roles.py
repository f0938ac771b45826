"""A line per role of a run: number of processes, rates, lag, weight version, health."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from penstock.launch.inspection.flow import Flow
from penstock.launch.inspection.observation import Observation
from penstock.launch.inspection.processes import ProcessSnapshot

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

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def role_rows(now: Observation, flow: Flow) -> list[RoleRow]:
    """Return a row for each role, in the order in which a fragment passes them."""
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
    """Return the lag in versions as text.

    An evaluator plays the version that it was asked for and has none.
    """
    applied = _applied(role, now) if role != "evaluator" else []
    if not applied or now.status is None:
        return ""
    worst = max(0, now.status.latest.version - min(applied))
    return f"{worst} version{'' if worst == 1 else 's'} behind"


def _restarts(role: str, launchers: tuple[ProcessSnapshot, ...]) -> int:
    return round(sum(snapshot.total("restarts_total", role=role) or 0.0 for snapshot in launchers))
