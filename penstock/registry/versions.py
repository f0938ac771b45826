"""Changes of a policy's versions in the caller's transaction: registration, promotion, rollback, retirement.

Each change of the serving versions raises the revision of the traffic: one number notifies every process that
follows a policy. Statuses are written one after the other (flush), since the database allows only one active
version at any moment.
"""

from dataclasses import asdict, dataclass, replace
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from penstock.registry import models
from penstock.registry.models import EventRow, RangeRow, TrafficRow, VersionRow, version_record
from penstock.registry.records import (
    MAX_EVENTS,
    MAX_PINNED,
    Action,
    DifferentBytes,
    Evaluation,
    Event,
    NewVersion,
    NotAllowed,
    Origin,
    PolicyVersion,
    Status,
    TooManyPinned,
    UnknownVersion,
    check_text,
)
from penstock.registry.traffic import check_canary_share

RANGE: Final = 2**26
"""Count of version numbers that are reserved for a run, where several runs train one policy."""
_WORTH: Final = {Origin.PERIODIC: 0, Origin.IMPORT: 1, Origin.ROLLBACK: 1, Origin.FINAL: 2, Origin.BEST: 3}
"""Order in which versions are retired to make room: the lowest first."""
_PROMOTABLE: Final = {
    Status.CANARY: (Status.CANDIDATE, Status.ROLLED_BACK),
    Status.ACTIVE: (Status.CANDIDATE, Status.CANARY),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The result of a rollback."""

    withdrawn: PolicyVersion
    active: PolicyVersion | None
    """The version that is active now; a learner publishes its weights as a new version."""


def reserve(session: Session, policy: str, run: str) -> int:
    """Reserve RANGE version numbers for a run; returns the lowest, the same on each call of the run."""
    known = session.get(RangeRow, (policy, run))
    if known is not None:
        return known.first
    registered = session.scalar(select(func.max(VersionRow.version)).where(VersionRow.policy == policy))
    newest = session.scalar(select(func.max(RangeRow.first)).where(RangeRow.policy == policy))
    used = max(registered or 0, 0 if newest is None else newest + RANGE - 1)
    first = -(-used // RANGE) * RANGE + 1
    session.add(RangeRow(policy=policy, run=run, first=first))
    return first


def register(session: Session, new: NewVersion, *, by: str, make_room: bool = False) -> PolicyVersion:
    """Register a version as candidate; returns the existing record of a version that is registered.

    make_room: retire the least valuable candidate or rolled back version when MAX_PINNED are pinned.
    Raises DifferentBytes where the number belongs to other weights, TooManyPinned, Conflict.
    """
    known = _same(session, new)
    if known is not None:
        return version_record(known)
    _check_room(session, new, by=by, make_room=make_room)
    row = models.version_row(new)
    session.add(row)
    detail = {"origin": new.origin.value, "sha256": new.sha256}
    models.audit(session, new.policy, new.version, Action.REGISTERED, by=by, reason=new.reason, detail=detail)
    session.flush()
    return version_record(row)


def record_evaluation(
    session: Session, policy: str, version: int, evaluation: Evaluation, *, by: str
) -> PolicyVersion:
    """Replace the evaluation of a version; the same evaluation again changes nothing."""
    row, result = models.find(session, policy, version), asdict(evaluation)
    if row.evaluation != result:
        row.evaluation, row.changed = result, models.now()
        models.audit(session, policy, version, Action.EVALUATED, by=by, reason="", detail=result)
    return version_record(row)


def promote(
    session: Session,
    policy: str,
    version: int,
    reason: str,
    *,
    by: str,
    to: Status = Status.ACTIVE,
    canary_share: float | None = None,
) -> PolicyVersion:
    """Make a version canary or active; the previous active version becomes the standby.

    Changes nothing for a version that has the status. canary_share: share of clients in [0, 1] for the
    canary; None: unchanged. Raises UnknownVersion, NotAllowed where its status does not allow the change,
    Conflict.
    """
    row = models.find(session, policy, version)
    check_canary_share(session, policy, to, canary_share)
    before = row.status
    if before is to:
        return version_record(row)
    _check_promotable(row, to)
    check_text("reason", reason)
    traffic = models.traffic_row(session, policy)
    if to is Status.ACTIVE:
        _make_room_for_active(session, row)
    else:
        _refuse_second_canary(session, policy)
    _change(session, row, to, reason)
    if before is Status.CANARY:
        traffic.canary_share = 0.0
    if to is Status.CANARY and canary_share is not None:
        traffic.canary_share = canary_share
    models.raise_revision(traffic)
    _audit(session, row, Action.PROMOTED, before, by=by, reason=reason)
    return version_record(row)


def rollback(
    session: Session, policy: str, reason: str, *, by: str, version: int | None = None
) -> RolledBack:
    """Withdraw the canary, or replace the active version by its standby.

    version: None: the canary if there is one, else the active version. A caller that has judged a version
    must name it: a second withdrawal changes nothing and is not audited. Raises UnknownVersion, Conflict,
    NotAllowed for a version that is neither canary nor active or has no standby.
    """
    row = _serving(session, policy) if version is None else models.find(session, policy, version)
    if row.status is not Status.ROLLED_BACK:
        _withdraw(session, row, reason=reason, by=by)
    return RolledBack(withdrawn=version_record(row), active=active(session, policy))


def _withdraw(session: Session, row: VersionRow, *, reason: str, by: str) -> None:
    if row.status not in (Status.CANARY, Status.ACTIVE):
        raise NotAllowed(
            f"version={row.version} of policy={row.policy!r} is {row.status.value} and serves no client: "
            "only the canary and the active version are rolled back; retire it instead"
        )
    check_text("reason", reason)
    before = row.status
    successor = models.standby(session, row.policy) if before is Status.ACTIVE else None
    if before is Status.ACTIVE and successor is None:
        raise NotAllowed(
            f"policy={row.policy!r} keeps no version from before version={row.version}: "
            "promote another version instead"
        )
    _change(session, row, Status.ROLLED_BACK, reason)
    if successor is not None:
        _change(session, successor, Status.ACTIVE, f"version {row.version} was rolled back: {reason}")
    _leave_traffic(models.traffic_row(session, row.policy), row.version, was_canary=before is Status.CANARY)
    _audit(session, row, Action.ROLLED_BACK, before, by=by, reason=reason)


def awaiting_number(session: Session, policy: str) -> PolicyVersion | None:
    """Return the active version if a rollback restored it and its weights have no new version number yet.

    The learner, or `penstock policy` where none runs, publishes these weights again under a new number and
    calls `record_rollback`.
    """
    row = models.with_status(session, policy, Status.ACTIVE)
    if row is None:
        return None
    own = (EventRow.version == row.version) & EventRow.action.in_((Action.PROMOTED, Action.REGISTERED))
    is_decision = (EventRow.policy == policy) & (own | (EventRow.action == Action.ROLLED_BACK))
    for event in session.scalars(select(EventRow).where(is_decision).order_by(EventRow.number.desc())):
        if event.action is not Action.ROLLED_BACK:
            return None
        if event.detail["from"] == Status.ACTIVE.value:
            return version_record(row)
    return None


def record_rollback(
    session: Session,
    policy: str,
    *,
    version: int,
    restores: int,
    reason: str,
    by: str,
    sha256: str | None = None,
    size_bytes: int | None = None,
) -> PolicyVersion:
    """Register `version`, which was published with the weights of the pinned version `restores`.

    An active `restores` is retired, and the new version becomes active; otherwise it is a candidate. sha256,
    size_bytes: of the new bytes where they differ from the old ones. Raises UnknownVersion,
    DifferentBytes, Conflict, NotAllowed where `restores` is not pinned.
    """
    original = models.find(session, policy, restores)
    copy = replace(
        version_record(original),
        version=version,
        parent=restores,
        origin=Origin.ROLLBACK,
        reason=check_text("reason", reason),
        sha256=original.sha256 if sha256 is None else sha256,
        size_bytes=original.size_bytes if size_bytes is None else size_bytes,
    )
    known = _same(session, copy)
    if known is not None:
        return version_record(known)
    if original.status is Status.RETIRED and not original.standby:
        raise NotAllowed(
            f"version={restores} of policy={policy!r} is retired, its weights are not held: "
            "restore one of the pinned versions"
        )
    if original.status is not Status.ACTIVE:
        _check_room(session, copy, by=by, make_room=False)
    row = models.version_row(copy)
    session.add(row)
    session.flush()
    if original.status is Status.ACTIVE:
        _change(session, original, Status.RETIRED, f"version {version} has its content: {reason}")
        _change(session, row, Status.ACTIVE, reason)
        models.raise_revision(models.traffic_row(session, policy))
    detail = {"restores": restores, "status": row.status.value}
    models.audit(session, policy, version, Action.REGISTERED, by=by, reason=reason, detail=detail)
    return version_record(row)


def retire(session: Session, policy: str, version: int, reason: str, *, by: str) -> PolicyVersion:
    """Retire a version: its weights need not be kept. Raises NotAllowed for an active or named version."""
    row = models.find(session, policy, version)
    if row.status is Status.RETIRED and not row.standby:
        return version_record(row)
    if row.status is Status.ACTIVE:
        raise NotAllowed(
            f"version={row.version} of policy={row.policy!r} is active: promote another version first"
        )
    traffic = models.traffic_row(session, policy)
    if version in _named(traffic):
        raise NotAllowed(
            f"version={row.version} of policy={row.policy!r} is named by the traffic (shadow, pins): "
            "change the traffic first"
        )
    check_text("reason", reason)
    before = row.status
    _change(session, row, Status.RETIRED, reason)
    if before is Status.CANARY:
        _leave_traffic(traffic, version, was_canary=True)
    _audit(session, row, Action.RETIRED, before, by=by, reason=reason)
    return version_record(row)


def get(session: Session, policy: str, version: int) -> PolicyVersion:
    """Return a version; raises UnknownVersion."""
    return version_record(models.find(session, policy, version))


def every(session: Session, policy: str, status: Status | None = None) -> tuple[PolicyVersion, ...]:
    """Return the versions of a policy, oldest first. status: only versions with this status."""
    wanted = select(VersionRow).where(VersionRow.policy == policy).order_by(VersionRow.version)
    if status is not None:
        wanted = wanted.where(VersionRow.status == status)
    return tuple(map(version_record, session.scalars(wanted)))


def policies(session: Session) -> tuple[str, ...]:
    return tuple(session.scalars(select(VersionRow.policy).distinct().order_by(VersionRow.policy)))


def pinned(session: Session, policy: str) -> tuple[PolicyVersion, ...]:
    """Return the versions whose weights must be kept, at most MAX_PINNED, oldest first."""
    return tuple(map(version_record, models.pinned(session, policy)))


def active(session: Session, policy: str) -> PolicyVersion | None:
    return _record(models.with_status(session, policy, Status.ACTIVE))


def canary(session: Session, policy: str) -> PolicyVersion | None:
    return _record(models.with_status(session, policy, Status.CANARY))


def standby(session: Session, policy: str) -> PolicyVersion | None:
    """Return the version that a rollback of the active version restores, or None."""
    return _record(models.standby(session, policy))


def events(session: Session, policy: str, limit: int = 100) -> tuple[Event, ...]:
    """Return the latest events of a policy, newest first; raises ValueError for a limit out of range."""
    if not 1 <= limit <= MAX_EVENTS:
        raise ValueError(f"limit={limit}: must be between 1 and {MAX_EVENTS}")
    wanted = select(EventRow).where(EventRow.policy == policy).order_by(EventRow.number.desc())
    return tuple(map(models.event_record, session.scalars(wanted.limit(limit))))


def _record(row: VersionRow | None) -> PolicyVersion | None:
    return None if row is None else version_record(row)


def _serving(session: Session, policy: str) -> VersionRow:
    """Return the canary if there is one, else the active version."""
    for status in (Status.CANARY, Status.ACTIVE):
        row = models.with_status(session, policy, status)
        if row is not None:
            return row
    raise UnknownVersion(f"policy={policy!r} has neither canary nor active version: nothing to roll back")


def _same(session: Session, new: NewVersion) -> VersionRow | None:
    """Return the row of the version, if it is registered; raises DifferentBytes."""
    row = session.get(VersionRow, (new.policy, new.version))
    if row is not None and (row.sha256, row.run) != (new.sha256, new.run):
        raise DifferentBytes(
            f"version={new.version} of policy={new.policy!r} is registered with sha256={row.sha256} by "
            f"run={row.run!r}, not sha256={new.sha256} by run={new.run!r}: numbers are never reused; "
            "runs that share a registry need policy names of their own"
        )
    return row


def _check_room(session: Session, new: NewVersion, *, by: str, make_room: bool) -> None:
    held = models.pinned(session, new.policy)
    if len(held) < MAX_PINNED:
        return
    spare = _spare(session, new.policy, held) if make_room else []
    if not spare:
        raise TooManyPinned(
            f"policy={new.policy!r} keeps {len(held)} versions, at most {MAX_PINNED}: retire one of "
            f"{', '.join(str(row.version) for row in held)} before registering version={new.version}"
        )
    for row in spare[: len(held) - MAX_PINNED + 1]:
        reason = f"made room for version {new.version}"
        retire(session, row.policy, row.version, reason, by=by)


def _spare(session: Session, policy: str, held: list[VersionRow]) -> list[VersionRow]:
    """Return the rows of `held` that no client uses: rolled back ones first, then by origin and age."""
    named = _named(models.traffic_row(session, policy))
    idle = [
        row
        for row in held
        if row.status in (Status.CANDIDATE, Status.ROLLED_BACK) and row.version not in named
    ]
    return sorted(idle, key=lambda row: (row.status is Status.CANDIDATE, _WORTH[row.origin], row.version))


def _named(traffic: TrafficRow) -> frozenset[int]:
    """Return the versions that the traffic names: shadow and pins."""
    shadow = () if traffic.shadow is None else (traffic.shadow,)
    return frozenset((*shadow, *traffic.pins.values()))


def _check_promotable(row: VersionRow, to: Status) -> None:
    if to not in _PROMOTABLE:
        raise ValueError(f"to={to.value!r}: a version is promoted to 'canary' or 'active'")
    if row.status in _PROMOTABLE[to] or (to is Status.ACTIVE and row.standby):
        return
    remedy = {
        Status.RETIRED: "its weights may be gone: register them as a new version",
        Status.ROLLED_BACK: "promote it to canary first",
        Status.ACTIVE: "promote another version to active first",
    }
    raise NotAllowed(
        f"version={row.version} of policy={row.policy!r} is {row.status.value} and cannot become {to.value}: "
        f"{remedy.get(row.status, 'choose a candidate')}"
    )


def _refuse_second_canary(session: Session, policy: str) -> None:
    canary = models.with_status(session, policy, Status.CANARY)
    if canary is not None:
        raise NotAllowed(
            f"version={canary.version} is the canary of policy={policy!r}: promote it, roll it back or "
            "retire it first"
        )


def _make_room_for_active(session: Session, successor: VersionRow) -> None:
    """Make the active version the standby in place of the previous standby."""
    standby = models.standby(session, successor.policy)
    if standby is not None:
        standby.standby = False
        session.flush()
    active = models.with_status(session, successor.policy, Status.ACTIVE)
    if active is not None:
        _change(session, active, Status.RETIRED, f"version {successor.version} became active", standby=True)


def _change(session: Session, row: VersionRow, to: Status, reason: str, *, standby: bool = False) -> None:
    row.status, row.standby, row.reason, row.changed = to, standby, reason, models.now()
    session.flush()


def _leave_traffic(traffic: TrafficRow, version: int, *, was_canary: bool) -> None:
    """Remove `version` from the traffic: no client is routed to it any more."""
    if was_canary:
        traffic.canary_share = 0.0
    if traffic.shadow == version:
        traffic.shadow = None
    traffic.pins = {key: pin for key, pin in traffic.pins.items() if pin != version}
    models.raise_revision(traffic)


def _audit(
    session: Session, row: VersionRow, action: Action, before: Status, *, by: str, reason: str
) -> None:
    detail = {"from": before.value, "to": row.status.value}
    models.audit(session, row.policy, row.version, action, by=by, reason=reason, detail=detail)
