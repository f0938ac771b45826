"""The tables, as SQLAlchemy maps them; a change of a table needs another revision of `registry.REGISTRY`.

Partial unique indexes ensure, for every writer, that a policy has at most one active, one canary and one
standby version. Rows never leave this package: callers receive `records`.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock.registry import records

NAMES: Final = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
}
"""Names of constraints and indexes that a table does not name itself."""


_NUMBER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


class UtcTime(sa.TypeDecorator[datetime]):
    """A time in UTC, with its zone in Python; SQLite stores none."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def words(kind: type[StrEnum], name: str) -> sa.Enum:
    """Return a column type for the values of an enumeration: text with a check, no type of PostgreSQL."""
    return sa.Enum(
        kind,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = sa.MetaData(naming_convention=NAMES)


class VersionRow(Base):
    """A registered weight version."""

    __tablename__ = "policy_versions"

    policy: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    version: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True, autoincrement=False)
    parent: Mapped[int | None] = mapped_column(sa.BigInteger)
    run: Mapped[str] = mapped_column(sa.String(64))
    update: Mapped[int] = mapped_column("update_count", sa.BigInteger)
    sha256: Mapped[str] = mapped_column(sa.String(64))
    size_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    configuration: Mapped[str] = mapped_column(sa.String(64))
    evaluation: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    origin: Mapped[records.Origin] = mapped_column(words(records.Origin, "origin"))
    status: Mapped[records.Status] = mapped_column(words(records.Status, "status"))
    standby: Mapped[bool]
    reason: Mapped[str] = mapped_column(sa.Text)
    created: Mapped[datetime] = mapped_column(UtcTime)
    changed: Mapped[datetime] = mapped_column(UtcTime)
    place: Mapped[str] = mapped_column(sa.Text, server_default="")

    __table_args__ = (
        sa.CheckConstraint("NOT standby OR status = 'retired'", name="standby"),
        *(
            sa.Index(
                f"one_{name}",
                "policy",
                unique=True,
                sqlite_where=sa.text(condition),
                postgresql_where=sa.text(condition),
            )
            for name, condition in (
                ("active", "status = 'active'"),
                ("canary", "status = 'canary'"),
                ("standby", "standby"),
            )
        ),
    )


class RangeRow(Base):
    """The version numbers that are reserved for a run. first: the lowest of them."""

    __tablename__ = "version_ranges"

    policy: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    run: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    first: Mapped[int] = mapped_column(sa.BigInteger)

    __table_args__ = (sa.Index("ix_version_ranges_first", "policy", "first", unique=True),)


class LabelRow(Base):
    """A name of a version, next to its number."""

    __tablename__ = "version_labels"

    policy: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    label: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    version: Mapped[int] = mapped_column(sa.BigInteger)


class TrafficRow(Base):
    """The traffic of a policy."""

    __tablename__ = "traffic"

    policy: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    revision: Mapped[int] = mapped_column(sa.BigInteger)
    experiment: Mapped[str] = mapped_column(sa.String(64))
    canary_share: Mapped[float] = mapped_column(sa.Double)
    latest_share: Mapped[float] = mapped_column(sa.Double)
    shadow: Mapped[int | None] = mapped_column(sa.BigInteger)
    pins: Mapped[dict[str, int]] = mapped_column(sa.JSON)
    changed: Mapped[datetime] = mapped_column(UtcTime)

    __table_args__ = (
        sa.CheckConstraint(
            "canary_share >= 0 AND latest_share >= 0 AND canary_share + latest_share <= 1", name="shares"
        ),
    )


class EventRow(Base):
    """An event of the audit; rows are only added."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str] = mapped_column(sa.String(64), index=True)
    version: Mapped[int | None] = mapped_column(sa.BigInteger)
    action: Mapped[records.Action] = mapped_column(words(records.Action, "action"))
    by: Mapped[str] = mapped_column("by_whom", sa.String(128))
    reason: Mapped[str] = mapped_column(sa.Text)
    detail: Mapped[dict[str, Any]] = mapped_column(sa.JSON)
    time: Mapped[datetime] = mapped_column(UtcTime)


class FeedbackRow(Base):
    """A reward that arrived late."""

    __tablename__ = "feedback"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str] = mapped_column(sa.String(64))
    episode: Mapped[str] = mapped_column(sa.String(128), index=True)
    step: Mapped[int] = mapped_column(sa.BigInteger)
    amount: Mapped[float] = mapped_column(sa.Double)
    time: Mapped[datetime] = mapped_column(UtcTime)
    caller: Mapped[str] = mapped_column(sa.String(16), server_default="")
    request_key: Mapped[str | None] = mapped_column(sa.String(64))

    __table_args__ = (
        sa.Index("ix_feedback_caller", "caller", "number"),
        sa.Index("ix_feedback_request_key", "policy", "request_key", unique=True),
    )


class TrialRow(Base):
    """The trial of a policy's canary."""

    __tablename__ = "trials"

    policy: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    trial: Mapped[str] = mapped_column(sa.String(160))
    state: Mapped[str] = mapped_column(sa.Text)
    changed: Mapped[datetime] = mapped_column(UtcTime)


class TrialClientRow(Base):
    """A client that has been compared at one level of the trial."""

    __tablename__ = "trial_clients"

    policy: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    client: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    level: Mapped[int] = mapped_column(sa.Integer, primary_key=True, autoincrement=False)


class RatingRow(Base):
    """A rating of a response: a score, or a preference over another response."""

    __tablename__ = "ratings"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str] = mapped_column(sa.String(64), index=True)
    version: Mapped[int | None] = mapped_column(sa.BigInteger)
    conversation: Mapped[str] = mapped_column(sa.String(128))
    key: Mapped[str] = mapped_column(sa.String(64))
    source: Mapped[str] = mapped_column(sa.String(128))
    prompt: Mapped[Any] = mapped_column(sa.JSON)
    response: Mapped[str] = mapped_column(sa.Text)
    score: Mapped[float | None] = mapped_column(sa.Double)
    rejected: Mapped[str | None] = mapped_column(sa.Text)
    created: Mapped[datetime] = mapped_column(UtcTime)
    public_id: Mapped[str] = mapped_column(sa.String(32), server_default="")
    project: Mapped[str] = mapped_column(sa.String(24), server_default="")
    run: Mapped[str] = mapped_column(sa.String(64), server_default="")
    rater: Mapped[str] = mapped_column(sa.String(32), server_default="")
    notes: Mapped[str] = mapped_column(sa.Text, server_default="")
    request_key: Mapped[str | None] = mapped_column(sa.String(64))
    text_bytes: Mapped[int] = mapped_column(sa.BigInteger, server_default="0")

    __table_args__ = (
        sa.CheckConstraint("(score IS NULL) <> (rejected IS NULL)", name="kind"),
        sa.Index("ix_ratings_rater", "project", "rater"),
        sa.Index("ix_ratings_request_key", "policy", "request_key", unique=True),
    )


class RatingUsageRow(Base):
    """Number and text size of the ratings of a project."""

    __tablename__ = "rating_usage"

    project: Mapped[str] = mapped_column(sa.String(24), primary_key=True)
    ratings: Mapped[int] = mapped_column(sa.BigInteger)
    text_bytes: Mapped[int] = mapped_column(sa.BigInteger)


# ---- Convert rows to records and back; audit changes and raise the revision of the traffic.


def values(kind: type[Any], source: object) -> dict[str, Any]:
    return {field.name: getattr(source, field.name) for field in fields(kind)}


def version_row(new: records.NewVersion) -> VersionRow:
    own = values(records.NewVersion, new)
    own["evaluation"] = None if new.evaluation is None else asdict(new.evaluation)
    time = now()
    return VersionRow(**own, status=records.Status.CANDIDATE, standby=False, created=time, changed=time)


def version_record(row: VersionRow) -> records.PolicyVersion:
    evaluation = None if row.evaluation is None else records.Evaluation(**row.evaluation)
    return records.PolicyVersion(**values(records.PolicyVersion, row) | {"evaluation": evaluation})


def traffic_record(policy: str, row: TrafficRow | None) -> records.Traffic:
    """Return the record of a row; None: of a policy whose traffic was never changed."""
    if row is None:
        return records.Traffic(policy=policy)
    return records.Traffic(**values(records.Traffic, row) | {"pins": MappingProxyType(dict(row.pins))})


def event_record(row: EventRow) -> records.Event:
    return records.Event(**values(records.Event, row) | {"detail": MappingProxyType(row.detail)})


def find(session: Session, policy: str, version: int) -> VersionRow:
    row = session.get(VersionRow, (policy, version))
    if row is None:
        raise records.UnknownVersion(
            f"version={version} of policy={policy!r} is not registered: "
            "`penstock policy list` shows those that are"
        )
    return row


def with_status(session: Session, policy: str, status: records.Status) -> VersionRow | None:
    wanted = sa.select(VersionRow).where(VersionRow.policy == policy, VersionRow.status == status)
    return session.scalars(wanted).one_or_none()


def standby(session: Session, policy: str) -> VersionRow | None:
    wanted = sa.select(VersionRow).where(VersionRow.policy == policy, VersionRow.standby)
    return session.scalars(wanted).one_or_none()


def pinned(session: Session, policy: str) -> list[VersionRow]:
    """Return the rows of the versions whose weights are kept, oldest first."""
    held = (VersionRow.status != records.Status.RETIRED) | VersionRow.standby
    wanted = sa.select(VersionRow).where(VersionRow.policy == policy, held)
    return list(session.scalars(wanted.order_by(VersionRow.version)))


def traffic_row(session: Session, policy: str) -> TrafficRow:
    """Return the row of a policy's traffic, inserted where it is missing; its revision is not raised."""
    row = session.get(TrafficRow, policy)
    if row is None:
        row = TrafficRow(
            **values(records.Traffic, records.Traffic(policy=policy)) | {"pins": {}, "changed": now()}
        )
        session.add(row)
    return row


def raise_revision(row: TrafficRow) -> None:
    """Raise the revision: processes that follow the policy then read its arms and traffic again."""
    row.revision += 1
    row.changed = now()


def audit(
    session: Session,
    policy: str,
    version: int | None,
    action: records.Action,
    *,
    by: str,
    reason: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    session.add(
        EventRow(
            policy=policy,
            version=version,
            action=action,
            by=records.check_text("by", by)[:128],
            reason=reason,
            detail=dict(detail or {}),
            time=now(),
        )
    )


def now() -> datetime:
    return datetime.now(UTC)
