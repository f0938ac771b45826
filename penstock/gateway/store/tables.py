"""The tables of the gateway, and its database: SQLite for one gateway, PostgreSQL where several share it.

A change of a table needs another revision of `GATEWAY`. Secrets are stored as digests only: passwords as
argon2id, tokens as SHA-256 of 256 random bits.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import JSON, BigInteger, Double, Index, Integer, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from penstock.registry.models import NAMES, UtcTime, words
from penstock.registry.registry import Database, Schema


class Role(StrEnum):
    """Role of a member: may look; may also train, promote and rate; may also manage members."""

    VIEWER = "viewer"
    EDITOR = "editor"
    OWNER = "owner"

    def includes(self, other: "Role") -> bool:
        ranks = tuple(Role)
        return ranks.index(self) >= ranks.index(other)


class JobState(StrEnum):
    """State of a job.

    queued ─► running ─► finished | failed | cancelled | lost        queued ─► cancelled

    failed: it ended with a cause. lost: its processes are gone, and it is not known how they ended.
    """

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def is_open(self) -> bool:
        """Return whether it will change again."""
        return self in {JobState.QUEUED, JobState.RUNNING}


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMES)


class UserRow(Base):
    """A person. session_number: access tokens with another one are refused."""

    __tablename__ = "users"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    password: Mapped[str] = mapped_column(String(256))
    session_number: Mapped[int] = mapped_column(Integer)
    disabled: Mapped[bool]
    created: Mapped[datetime] = mapped_column(UtcTime)


class IdentityRow(Base):
    """A person as a provider of identities knows them."""

    __tablename__ = "identities"

    issuer: Mapped[str] = mapped_column(String(256), primary_key=True)
    subject: Mapped[str] = mapped_column(String(256), primary_key=True)
    user: Mapped[str] = mapped_column("user_id", String(32), index=True)
    since: Mapped[datetime] = mapped_column(UtcTime)


class ProjectRow(Base):
    """A project, by the name that its addresses and policies carry."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(24), primary_key=True)
    created: Mapped[datetime] = mapped_column(UtcTime)


class MemberRow(Base):
    """A member of a project, and their role."""

    __tablename__ = "members"

    project: Mapped[str] = mapped_column(String(24), primary_key=True)
    user: Mapped[str] = mapped_column("user_id", String(32), primary_key=True, index=True)
    role: Mapped[Role] = mapped_column(words(Role, "role"))
    since: Mapped[datetime] = mapped_column(UtcTime)


class InvitationRow(Base):
    """An invitation of one person to a project, valid once."""

    __tablename__ = "invitations"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(String(24))
    role: Mapped[Role] = mapped_column(words(Role, "role"))
    by: Mapped[str] = mapped_column("by_whom", String(64))
    expires: Mapped[datetime] = mapped_column(UtcTime)
    used: Mapped[datetime | None] = mapped_column(UtcTime)


class ApiTokenRow(Base):
    """A token by which a program acts in one project."""

    __tablename__ = "api_tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    project: Mapped[str] = mapped_column(String(24), index=True)
    name: Mapped[str] = mapped_column(String(64))
    role: Mapped[Role] = mapped_column(words(Role, "role"))
    by: Mapped[str] = mapped_column("by_whom", String(64))
    created: Mapped[datetime] = mapped_column(UtcTime)
    expires: Mapped[datetime | None] = mapped_column(UtcTime)
    revoked: Mapped[datetime | None] = mapped_column(UtcTime)


class SessionRow(Base):
    """One sign-in of a person, until it ends or expires."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    user: Mapped[str] = mapped_column("user_id", String(32), index=True)
    expires: Mapped[datetime] = mapped_column(UtcTime)
    ended: Mapped[datetime | None] = mapped_column(UtcTime)
    reason: Mapped[str] = mapped_column(String(64))


class RefreshRow(Base):
    """A refresh token of a session. used: when it was exchanged for the next one."""

    __tablename__ = "refresh_tokens"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    session: Mapped[str] = mapped_column("session_id", String(32), index=True)
    used: Mapped[datetime | None] = mapped_column(UtcTime)


class AttemptRow(Base):
    """Number of attempts to sign in since `since`, of an account, an address, or both together."""

    __tablename__ = "attempts"

    subject: Mapped[str] = mapped_column(String(64), primary_key=True)
    count: Mapped[int] = mapped_column("attempts", Integer)
    since: Mapped[datetime] = mapped_column(UtcTime)


class AuditRow(Base):
    """A row of the audit; deleted only if the action that it announced was refused."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
    project: Mapped[str | None] = mapped_column(String(24), index=True)
    by: Mapped[str] = mapped_column("by_whom", String(64))
    action: Mapped[str] = mapped_column(String(48))
    subject: Mapped[str] = mapped_column(Text)
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    time: Mapped[datetime] = mapped_column(UtcTime)


class FeedbackLinkRow(Base):
    """A link by which one person without an account rates the responses that it names, once each.

    items: objects of prompt, response and, if known, runId, key and version. rater: name of the person who
    rates, as chosen by the maker of the link.
    """

    __tablename__ = "feedback_links"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    project: Mapped[str] = mapped_column(String(24), index=True)
    agent: Mapped[str] = mapped_column(String(39))
    items: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    rater: Mapped[str] = mapped_column(String(64))
    by: Mapped[str] = mapped_column("by_whom", String(64))
    created: Mapped[datetime] = mapped_column(UtcTime)
    expires: Mapped[datetime] = mapped_column(UtcTime)
    revoked: Mapped[datetime | None] = mapped_column(UtcTime)


class JobRow(Base):
    """A training job.

    facts: recorded when it was submitted, by names of its kind of job. place: the runner that has it, ""
    while it is queued. cancelled_by: who cancelled it, or None. result: of a finished one, by names of its
    kind.
    """

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    project: Mapped[str] = mapped_column(String(24))
    agent: Mapped[str] = mapped_column(String(39))
    template: Mapped[str] = mapped_column(String(64))
    numbers: Mapped[dict[str, Any]] = mapped_column(JSON)
    facts: Mapped[dict[str, Any]] = mapped_column(JSON)
    request_key: Mapped[str | None] = mapped_column(String(64))
    by: Mapped[str] = mapped_column("by_whom", String(64))
    state: Mapped[JobState] = mapped_column(words(JobState, "state"))
    cause: Mapped[str] = mapped_column(Text)
    place: Mapped[str] = mapped_column(String(32))
    cancelled_by: Mapped[str | None] = mapped_column(String(64))
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    created: Mapped[datetime] = mapped_column(UtcTime)
    began: Mapped[datetime | None] = mapped_column(UtcTime)
    ended: Mapped[datetime | None] = mapped_column(UtcTime)

    __table_args__ = (
        Index("ix_jobs_agent", "project", "agent"),
        Index("ix_jobs_state", "state", "place"),
        Index("ix_jobs_request_key", "project", "request_key", unique=True),
    )


class ConversationRow(Base):
    """A conversation with a version of an agent, rated or not. conversation: its name."""

    __tablename__ = "agent_conversations"

    project: Mapped[str] = mapped_column(String(24), primary_key=True)
    agent: Mapped[str] = mapped_column(String(39), primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    conversation: Mapped[str] = mapped_column(String(128), primary_key=True)


class ProjectUsageRow(Base):
    """Stored rows of a project that would take long to count."""

    __tablename__ = "project_usage"

    project: Mapped[str] = mapped_column(String(24), primary_key=True)
    conversations: Mapped[int] = mapped_column(BigInteger)


class PolicyVersionRow(Base):
    """A policy that a job trained.

    id: of the job. version: its label, once for an agent. reward_mean, reward_std: None where not known.
    """

    __tablename__ = "agent_policy_versions"

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    project: Mapped[str] = mapped_column(String(24))
    agent_id: Mapped[str] = mapped_column(String(39))
    version: Mapped[str] = mapped_column(String(32))
    model_path: Mapped[str] = mapped_column(Text)
    reward_model_path: Mapped[str] = mapped_column(Text)
    feedback_count: Mapped[int] = mapped_column(BigInteger)
    reward_mean: Mapped[float | None] = mapped_column(Double)
    reward_std: Mapped[float | None] = mapped_column(Double)
    created_at: Mapped[datetime] = mapped_column(UtcTime)

    __table_args__ = (Index("ix_agent_policy_versions_label", "project", "agent_id", "version", unique=True),)


GATEWAY: Final = Schema(
    tables=Base.metadata,
    revision="0008",
    version_table="gateway_version",  # a registry in the same PostgreSQL database keeps its own
    remedy="start `penstock gateway` once, which makes them",
)


def open_database(url: str, *, migrate: bool) -> Database:
    """Return the database at a URL. migrate: make the tables where there are none.

    Raises SchemaMismatch for tables that are absent or of another revision, Unavailable, and ValueError for a
    URL of another kind.
    """
    return GATEWAY.checked(Database(url, "accounts database"), migrate=migrate)
