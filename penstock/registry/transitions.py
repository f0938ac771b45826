"""Change a version's status within the caller's transaction: promote, roll back, retire.

Each change of what serves raises the traffic's revision, so that one number notifies every process that
follows a policy. Statuses are written one after the other (flush): the database admits one active version
even in between.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy.orm import Session

from penstock.registry import models
from penstock.registry.models import TrafficRow, VersionRow
from penstock.registry.records import Action, NotAllowed, PolicyVersion, Status, check_text

_PROMOTABLE: Final = {
    Status.CANARY: (Status.CANDIDATE, Status.ROLLED_BACK),
    Status.ACTIVE: (Status.CANDIDATE, Status.CANARY),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The result of a rollback."""

    withdrawn: PolicyVersion
    active: PolicyVersion | None
    """The version that is active now; a learner publishes its content as a new version."""


def promote(
    session: Session, row: VersionRow, to: Status, *, reason: str, by: str, canary_share: float | None
) -> None:
    """Make a version canary or active; raises NotAllowed. One that is there already stays, unaudited."""
    if row.status is to:
        return
    _check_promotable(row, to)
    check_text("reason", reason)
    before = row.status
    traffic = models.traffic_row(session, row.policy)
    if to is Status.ACTIVE:
        _make_room_for_active(session, row)
    else:
        _refuse_second_canary(session, row.policy)
    _change(session, row, to, reason)
    if before is Status.CANARY:
        traffic.canary_share = 0.0
    if to is Status.CANARY and canary_share is not None:
        traffic.canary_share = canary_share
    models.raise_revision(traffic)
    _audit(session, row, Action.PROMOTED, before, by=by, reason=reason)


def rollback(session: Session, row: VersionRow, *, reason: str, by: str) -> None:
    """Withdraw the canary, or the active version for the one before it; raises NotAllowed.

    Withdrawing a version again changes nothing and is not audited, so that of two callers only the first
    acts.
    """
    if row.status is Status.ROLLED_BACK:
        return
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


def replace_by_copy(
    session: Session, original: VersionRow, copy: VersionRow, *, reason: str, by: str
) -> None:
    """Add `copy`, a new version with `original`'s content; it takes over where `original` is active."""
    session.add(copy)
    session.flush()
    if original.status is Status.ACTIVE:
        _change(session, original, Status.RETIRED, f"version {copy.version} has its content: {reason}")
        _change(session, copy, Status.ACTIVE, reason)
        models.raise_revision(models.traffic_row(session, copy.policy))
    detail = {"restores": original.version, "status": copy.status.value}
    models.audit(session, copy.policy, copy.version, Action.REGISTERED, by=by, reason=reason, detail=detail)


def retire(session: Session, row: VersionRow, *, reason: str, by: str) -> None:
    """Release a version's weights; raises NotAllowed while it is active or traffic names it."""
    if row.status is Status.RETIRED and not row.standby:
        return
    if row.status is Status.ACTIVE:
        raise NotAllowed(
            f"version={row.version} of policy={row.policy!r} is active: promote another version first"
        )
    traffic = models.traffic_row(session, row.policy)
    if row.version in named(traffic):
        raise NotAllowed(
            f"version={row.version} of policy={row.policy!r} is named by the traffic (shadow, pins): "
            "change the traffic first"
        )
    check_text("reason", reason)
    before = row.status
    _change(session, row, Status.RETIRED, reason)
    if before is Status.CANARY:
        _leave_traffic(traffic, row.version, was_canary=True)
    _audit(session, row, Action.RETIRED, before, by=by, reason=reason)


def named(traffic: TrafficRow) -> frozenset[int]:
    """Return the versions that the traffic names itself, beside the arms."""
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
    """Make the active version the standby, and release the standby of before."""
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
    """Remove `version` from the traffic, so that no client is sent to it any more."""
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
