"""The tables, as SQLAlchemy maps them and `migrations/` makes them.

Partial unique indexes ensure, for every writer, that a policy has at most one active, one canary and one
standby version. Rows never leave this package: callers receive `records`.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    Enum,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    select,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock.registry.records import (
    Action,
    Evaluation,
    Event,
    NewVersion,
    Origin,
    PolicyVersion,
    Status,
    Traffic,
    UnknownVersion,
    check_text,
)

NAMES: Final = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
}
"""How constraints and indexes are called where a table does not say."""


_NUMBER: Final = BigInteger().with_variant(Integer(), "sqlite")


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC, aware on both sides; SQLite stores no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def words(kind: type[StrEnum], name: str) -> Enum:
    """Return a column of an enumeration's values, as text with a check: no type to migrate on PostgreSQL."""
    return Enum(
        kind,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMES)


class VersionRow(Base):
    """A registered weight version."""

    __tablename__ = "policy_versions"

    policy: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    parent: Mapped[int | None] = mapped_column(BigInteger)
    run: Mapped[str] = mapped_column(String(64))
    update: Mapped[int] = mapped_column("update_count", BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    configuration: Mapped[str] = mapped_column(String(64))
    evaluation: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    origin: Mapped[Origin] = mapped_column(words(Origin, "origin"))
    status: Mapped[Status] = mapped_column(words(Status, "status"))
    standby: Mapped[bool]
    reason: Mapped[str] = mapped_column(Text)
    created: Mapped[datetime] = mapped_column(UtcTime)
    changed: Mapped[datetime] = mapped_column(UtcTime)
    place: Mapped[str] = mapped_column(Text, server_default="")

    __table_args__ = (
        CheckConstraint("NOT standby OR status = 'retired'", name="standby"),
        *(
            Index(
                f"one_{name}",
                "policy",
                unique=True,
                sqlite_where=text(condition),
                postgresql_where=text(condition),
            )
            for name, condition in (
                ("active", "status = 'active'"),
                ("canary", "status = 'canary'"),
                ("standby", "standby"),
            )
        ),
    )


class RangeRow(Base):
    """The numbers that are reserved for the versions of a run. first: the lowest of them."""

    __tablename__ = "version_ranges"

    policy: Mapped[str] = mapped_column(String(64), primary_key=True)
    run: Mapped[str] = mapped_column(String(64), primary_key=True)
    first: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index("ix_version_ranges_first", "policy", "first", unique=True),)


class LabelRow(Base):
    """A name of a version, beside its number."""

    __tablename__ = "version_labels"

    policy: Mapped[str] = mapped_column(String(64), primary_key=True)
    label: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger)


class TrafficRow(Base):
    """A policy's traffic."""

    __tablename__ = "traffic"

    policy: Mapped[str] = mapped_column(String(64), primary_key=True)
    revision: Mapped[int] = mapped_column(BigInteger)
    experiment: Mapped[str] = mapped_column(String(64))
    canary_share: Mapped[float] = mapped_column(Double)
    latest_share: Mapped[float] = mapped_column(Double)
    shadow: Mapped[int | None] = mapped_column(BigInteger)
    pins: Mapped[dict[str, int]] = mapped_column(JSON)
    changed: Mapped[datetime] = mapped_column(UtcTime)

    __table_args__ = (
        CheckConstraint(
            "canary_share >= 0 AND latest_share >= 0 AND canary_share + latest_share <= 1", name="shares"
        ),
    )


class EventRow(Base):
    """An event of the audit; rows are only added."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str] = mapped_column(String(64), index=True)
    version: Mapped[int | None] = mapped_column(BigInteger)
    action: Mapped[Action] = mapped_column(words(Action, "action"))
    by: Mapped[str] = mapped_column("by_whom", String(128))
    reason: Mapped[str] = mapped_column(Text)
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    time: Mapped[datetime] = mapped_column(UtcTime)


class FeedbackRow(Base):
    """A reward that arrived late."""

    __tablename__ = "feedback"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str] = mapped_column(String(64))
    episode: Mapped[str] = mapped_column(String(128), index=True)
    step: Mapped[int] = mapped_column(BigInteger)
    amount: Mapped[float] = mapped_column(Double)
    time: Mapped[datetime] = mapped_column(UtcTime)
    caller: Mapped[str] = mapped_column(String(16), server_default="")
    request_key: Mapped[str | None] = mapped_column(String(64))

    __table_args__ = (
        Index("ix_feedback_caller", "caller", "number"),
        Index("ix_feedback_request_key", "policy", "request_key", unique=True),
    )


class TrialRow(Base):
    """The trial of a policy's canary."""

    __tablename__ = "trials"

    policy: Mapped[str] = mapped_column(String(64), primary_key=True)
    trial: Mapped[str] = mapped_column(String(160))
    state: Mapped[str] = mapped_column(Text)
    changed: Mapped[datetime] = mapped_column(UtcTime)


class TrialClientRow(Base):
    """A client that was compared in the trial, at one level."""

    __tablename__ = "trial_clients"

    policy: Mapped[str] = mapped_column(String(64), primary_key=True)
    client: Mapped[str] = mapped_column(String(16), primary_key=True)
    level: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)


class RatingRow(Base):
    """A rating of a response: a score, or a preference over another response."""

    __tablename__ = "ratings"

    number: Mapped[int] = mapped_column(_NUMBER, primary_key=True)
    policy: Mapped[str] = mapped_column(String(64), index=True)
    version: Mapped[int | None] = mapped_column(BigInteger)
    conversation: Mapped[str] = mapped_column(String(128))
    key: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(128))
    prompt: Mapped[Any] = mapped_column(JSON)
    response: Mapped[str] = mapped_column(Text)
    score: Mapped[float | None] = mapped_column(Double)
    rejected: Mapped[str | None] = mapped_column(Text)
    created: Mapped[datetime] = mapped_column(UtcTime)
    public_id: Mapped[str] = mapped_column(String(32), server_default="")
    project: Mapped[str] = mapped_column(String(24), server_default="")
    run: Mapped[str] = mapped_column(String(64), server_default="")
    rater: Mapped[str] = mapped_column(String(32), server_default="")
    notes: Mapped[str] = mapped_column(Text, server_default="")
    request_key: Mapped[str | None] = mapped_column(String(64))
    text_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")

    __table_args__ = (
        CheckConstraint("(score IS NULL) <> (rejected IS NULL)", name="kind"),
        Index("ix_ratings_rater", "project", "rater"),
        Index("ix_ratings_request_key", "policy", "request_key", unique=True),
    )


class RatingUsageRow(Base):
    """How many ratings a project has, and of how much text."""

    __tablename__ = "rating_usage"

    project: Mapped[str] = mapped_column(String(24), primary_key=True)
    ratings: Mapped[int] = mapped_column(BigInteger)
    text_bytes: Mapped[int] = mapped_column(BigInteger)


# ---- Convert rows to records and back; audit changes and raise the revision of the traffic.


def values(kind: type[Any], source: object) -> dict[str, Any]:
    return {field.name: getattr(source, field.name) for field in fields(kind)}


def version_row(new: NewVersion) -> VersionRow:
    own = values(NewVersion, new)
    own["evaluation"] = None if new.evaluation is None else asdict(new.evaluation)
    time = now()
    return VersionRow(**own, status=Status.CANDIDATE, standby=False, created=time, changed=time)


def version_record(row: VersionRow) -> PolicyVersion:
    return PolicyVersion(**values(PolicyVersion, row) | _evaluation(row))


def registered_as(row: VersionRow) -> NewVersion:
    return NewVersion(**values(NewVersion, row) | _evaluation(row))


def _evaluation(row: VersionRow) -> dict[str, Any]:
    return {"evaluation": None if row.evaluation is None else Evaluation(**row.evaluation)}


def traffic_record(policy: str, row: TrafficRow | None) -> Traffic:
    """Return the record of a row; without one, that of a policy whose traffic was never changed."""
    if row is None:
        return Traffic(policy=policy)
    return Traffic(**values(Traffic, row) | {"pins": MappingProxyType(dict(row.pins))})


def event_record(row: EventRow) -> Event:
    return Event(**values(Event, row) | {"detail": MappingProxyType(row.detail)})


def find(session: Session, policy: str, version: int) -> VersionRow:
    row = session.get(VersionRow, (policy, version))
    if row is None:
        raise UnknownVersion(
            f"version={version} of policy={policy!r} is not registered: "
            "`penstock policy list` shows those that are"
        )
    return row


def with_status(session: Session, policy: str, status: Status) -> VersionRow | None:
    wanted = select(VersionRow).where(VersionRow.policy == policy, VersionRow.status == status)
    return session.scalars(wanted).one_or_none()


def standby(session: Session, policy: str) -> VersionRow | None:
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
        row = TrafficRow(**values(Traffic, Traffic(policy=policy)) | {"pins": {}, "changed": now()})
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
    return datetime.now(UTC)
