"""Keep versions: registration within the bound, and copies of old content under a new number."""

from dataclasses import asdict, replace
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.registry import models, transitions
from penstock.registry.models import EventRow, VersionRow
from penstock.registry.records import (
    MAX_PINNED,
    Action,
    DifferentBytes,
    Evaluation,
    NewVersion,
    NotAllowed,
    Origin,
    Status,
    TooManyPinned,
    UnknownVersion,
    check_text,
)

_WORTH: Final = {Origin.PERIODIC: 0, Origin.IMPORT: 1, Origin.ROLLBACK: 1, Origin.FINAL: 2, Origin.BEST: 3}
"""Order in which versions are retired when room is made: the least first."""


def register(session: Session, new: NewVersion, *, by: str, make_room: bool) -> VersionRow:
    """Add a candidate and return its row, or the row that exists when the version is registered already."""
    known = _same(session, new)
    if known is not None:
        return known
    _check_room(session, new, by=by, make_room=make_room)
    row = models.version_row(new, Status.CANDIDATE, models.now())
    session.add(row)
    detail = {"origin": new.origin.value, "sha256": new.sha256}
    models.audit(session, new.policy, new.version, Action.REGISTERED, by=by, reason=new.reason, detail=detail)
    session.flush()
    return row


def record_evaluation(session: Session, row: VersionRow, evaluation: Evaluation, *, by: str) -> None:
    """Record the evaluation of a version; the same result again is recorded once."""
    result = asdict(evaluation)
    if row.evaluation == result:
        return
    row.evaluation, row.changed = result, models.now()
    models.audit(session, row.policy, row.version, Action.EVALUATED, by=by, reason="", detail=result)


def serving(session: Session, policy: str) -> VersionRow:
    """Return the canary if there is one, else the active version."""
    for status in (Status.CANARY, Status.ACTIVE):
        row = models.with_status(session, policy, status)
        if row is not None:
            return row
    raise UnknownVersion(f"policy={policy!r} has neither canary nor active version: nothing to roll back")


def awaiting_number(session: Session, policy: str) -> VersionRow | None:
    """Return the active version where a rollback restored it."""
    active = models.with_status(session, policy, Status.ACTIVE)
    if active is None:
        return None
    own = (EventRow.version == active.version) & EventRow.action.in_((Action.PROMOTED, Action.REGISTERED))
    is_decision = (EventRow.policy == policy) & (own | (EventRow.action == Action.ROLLED_BACK))
    for event in session.scalars(select(EventRow).where(is_decision).order_by(EventRow.number.desc())):
        if event.action is not Action.ROLLED_BACK:
            return None
        if event.detail["from"] == Status.ACTIVE.value:
            return active
    return None


def copy_of(
    original: VersionRow, version: int, reason: str, *, sha256: str | None, size_bytes: int | None
) -> NewVersion:
    """Return `original`'s content as a new version under the number `version`."""
    return replace(
        _registered_as(original),
        version=version,
        parent=original.version,
        origin=Origin.ROLLBACK,
        reason=check_text("reason", reason),
        sha256=original.sha256 if sha256 is None else sha256,
        size_bytes=original.size_bytes if size_bytes is None else size_bytes,
    )


def restore(session: Session, original: VersionRow, copy: NewVersion, *, reason: str, by: str) -> VersionRow:
    """Add the copy, which takes over where `original` is active."""
    known = _same(session, copy)
    if known is not None:
        return known
    if original.status is Status.RETIRED and not original.standby:
        raise NotAllowed(
            f"version={original.version} of policy={original.policy!r} is retired, its weights are not held: "
            "restore one of the pinned versions"
        )
    if original.status is not Status.ACTIVE:
        _check_room(session, copy, by=by, make_room=False)
    row = models.version_row(copy, Status.CANDIDATE, models.now())
    transitions.replace_by_copy(session, original, row, reason=reason, by=by)
    return row


def _registered_as(row: VersionRow) -> NewVersion:
    record = models.version_record(row)
    return NewVersion(**{name: getattr(record, name) for name in NewVersion.__dataclass_fields__})


def _same(session: Session, new: NewVersion) -> VersionRow | None:
    """Return the row of this very version, if it is registered."""
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
        transitions.retire(session, row, reason=reason, by=by)


def _spare(session: Session, policy: str, held: list[VersionRow]) -> list[VersionRow]:
    """Return those of `held` that no client uses: the rolled back first, then by worth and age."""
    named = transitions.named(models.traffic_row(session, policy))
    idle = [
        row
        for row in held
        if row.status in (Status.CANDIDATE, Status.ROLLED_BACK) and row.version not in named
    ]
    return sorted(idle, key=lambda row: (row.status is Status.CANDIDATE, _WORTH[row.origin], row.version))
