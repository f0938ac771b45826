"""The tables, as SQLAlchemy maps them; `migrations/` makes them, and a test holds the two together.

Partial unique indexes ensure, for every writer, that a policy has at most one active, one canary and one
standby version. Rows never leave this package: callers receive `records`.
"""

from datetime import UTC, datetime
from enum import StrEnum
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
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from penstock.registry.records import Action, Origin, Status

NAMES: Final = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
}
"""How constraints and indexes are called where a table does not say."""


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC, aware on both sides; SQLite stores no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert an aware time to UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Mark the stored time as UTC."""
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

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
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

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
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

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
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
