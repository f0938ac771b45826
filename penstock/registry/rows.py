"""Convert rows to records and back; audit changes and raise the revision of the traffic."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.registry.models import EventRow, TrafficRow, VersionRow
from penstock.registry.records import (
    Action,
    Evaluation,
    Event,
    NewVersion,
    PolicyVersion,
    Status,
    Traffic,
    check_text,
)
from penstock.registry.registry_errors import UnknownVersion


def version_row(new: NewVersion, status: Status, now: datetime) -> VersionRow:
    """Return a row for a version that is not registered yet."""
    return VersionRow(
        policy=new.policy,
        version=new.version,
        parent=new.parent,
        run=new.run,
        update=new.update,
        sha256=new.sha256,
        size_bytes=new.size_bytes,
        configuration=new.configuration,
        evaluation=None if new.evaluation is None else asdict(new.evaluation),
        origin=new.origin,
        status=status,
        standby=False,
        reason=new.reason,
        created=now,
        changed=now,
        place=new.place,
    )


def version_record(row: VersionRow) -> PolicyVersion:
    """Return the record of a row."""
    return PolicyVersion(
        policy=row.policy,
        version=row.version,
        parent=row.parent,
        run=row.run,
        update=row.update,
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        configuration=row.configuration,
        evaluation=None if row.evaluation is None else Evaluation(**row.evaluation),
        origin=row.origin,
        status=row.status,
        standby=row.standby,
        reason=row.reason,
        created=row.created,
        changed=row.changed,
        place=row.place,
    )


def traffic_record(policy: str, row: TrafficRow | None) -> Traffic:
    """Return the record of a row; without one, that of a policy whose traffic was never changed."""
    if row is None:
        return Traffic(policy=policy)
    return Traffic(
        policy=policy,
        revision=row.revision,
        experiment=row.experiment,
        canary_share=row.canary_share,
        latest_share=row.latest_share,
        shadow=row.shadow,
        pins=MappingProxyType(dict(row.pins)),
        changed=row.changed,
    )


def event_record(row: EventRow) -> Event:
    """Return the record of a row."""
    return Event(
        number=row.number,
        policy=row.policy,
        version=row.version,
        action=row.action,
        by=row.by,
        reason=row.reason,
        detail=MappingProxyType(row.detail),
        time=row.time,
    )


def find(session: Session, policy: str, version: int) -> VersionRow:
    """Return the row of a version; raises UnknownVersion."""
    row = session.get(VersionRow, (policy, version))
    if row is None:
        raise UnknownVersion(
            f"version={version} of policy={policy!r} is not registered: "
            "`penstock policy list` shows those that are"
        )
    return row


def with_status(session: Session, policy: str, status: Status) -> VersionRow | None:
    """Return the row of the one version that is active or canary."""
    wanted = select(VersionRow).where(VersionRow.policy == policy, VersionRow.status == status)
    return session.scalars(wanted).one_or_none()


def standby(session: Session, policy: str) -> VersionRow | None:
    """Return the row of the version that a rollback makes active again."""
    wanted = select(VersionRow).where(VersionRow.policy == policy, VersionRow.standby)
    return session.scalars(wanted).one_or_none()


def pinned(session: Session, policy: str) -> list[VersionRow]:
    """Return the rows of the versions whose weights are held, oldest first."""
    held = (VersionRow.status != Status.RETIRED) | VersionRow.standby
    wanted = select(VersionRow).where(VersionRow.policy == policy, held)
    return list(session.scalars(wanted.order_by(VersionRow.version)))


def traffic_row(session: Session, policy: str) -> TrafficRow:
    """Return the row of a policy's traffic, made when it is missing; its revision is not raised."""
    row = session.get(TrafficRow, policy)
    if row is None:
        first = Traffic(policy=policy)
        row = TrafficRow(
            policy=policy,
            revision=first.revision,
            experiment=first.experiment,
            canary_share=first.canary_share,
            latest_share=first.latest_share,
            shadow=None,
            pins={},
            changed=now(),
        )
        session.add(row)
    return row


def raise_revision(row: TrafficRow) -> None:
    """Raise the revision, so that processes that follow this policy read its arms and traffic again."""
    row.revision += 1
    row.changed = now()


def audit(
    session: Session,
    policy: str,
    version: int | None,
    action: Action,
    *,
    by: str,
    reason: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Add a line to the audit; raises ValueError when `by` is empty."""
    session.add(
        EventRow(
            policy=policy,
            version=version,
            action=action,
            by=check_text("by", by)[:128],
            reason=reason,
            detail=dict(detail or {}),
            time=now(),
        )
    )


def now() -> datetime:
    """Return the time, in UTC."""
    return datetime.now(UTC)
