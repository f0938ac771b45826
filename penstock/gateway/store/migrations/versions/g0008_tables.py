"""All tables of a gateway."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_STATES = "'queued', 'running', 'finished', 'failed', 'cancelled', 'lost'"


def upgrade() -> None:
    """Make all tables."""
    _people()
    _tokens()
    _sessions()
    _audit()
    _feedback_links()
    _jobs()
    _conversations()


def _number() -> sa.Column[int]:
    return sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False)


def _role(table: str) -> tuple[sa.Column[str], sa.CheckConstraint]:
    check = sa.CheckConstraint("role IN ('viewer', 'editor', 'owner')", name=op.f(f"ck_{table}_role"))
    return sa.Column("role", sa.String(16), nullable=False), check


def _people() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("password", sa.String(256), nullable=False),
        sa.Column("session_number", sa.Integer, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
    op.create_table(
        "identities",
        sa.Column("issuer", sa.String(256), nullable=False),
        sa.Column("subject", sa.String(256), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("since", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("issuer", "subject", name=op.f("pk_identities")),
    )
    op.create_index("ix_identities_user_id", "identities", ["user_id"])
    op.create_table(
        "projects",
        sa.Column("name", sa.String(24), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    role, check = _role("members")
    op.create_table(
        "members",
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        role,
        sa.Column("since", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("project", "user_id", name=op.f("pk_members")),
        check,
    )
    op.create_index(op.f("ix_members_user_id"), "members", ["user_id"])


def _tokens() -> None:
    role, check = _role("invitations")
    op.create_table(
        "invitations",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("project", sa.String(24), nullable=False),
        role,
        sa.Column("by_whom", sa.String(64), nullable=False),
        sa.Column("expires", _TIME, nullable=False),
        sa.Column("used", _TIME),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_invitations")),
        check,
    )
    role, check = _role("api_tokens")
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        role,
        sa.Column("by_whom", sa.String(64), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("expires", _TIME),
        sa.Column("revoked", _TIME),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_tokens")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_tokens_digest")),
        check,
    )
    op.create_index(op.f("ix_api_tokens_project"), "api_tokens", ["project"])


def _sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("expires", _TIME, nullable=False),
        sa.Column("ended", _TIME),
        sa.Column("reason", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_user_id"), "sessions", ["user_id"])
    op.create_table(
        "refresh_tokens",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(32), nullable=False),
        sa.Column("used", _TIME),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_refresh_tokens")),
    )
    op.create_index(op.f("ix_refresh_tokens_session_id"), "refresh_tokens", ["session_id"])
    op.create_table(
        "attempts",
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("since", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("subject", name=op.f("pk_attempts")),
    )


def _audit() -> None:
    op.create_table(
        "audit",
        _number(),
        sa.Column("project", sa.String(24)),
        sa.Column("by_whom", sa.String(64), nullable=False),
        sa.Column("action", sa.String(48), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_project"), "audit", ["project"])


def _feedback_links() -> None:
    op.create_table(
        "feedback_links",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("agent", sa.String(39), nullable=False),
        sa.Column("items", sa.JSON, nullable=False),
        sa.Column("rater", sa.String(64), nullable=False),
        sa.Column("by_whom", sa.String(64), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("expires", _TIME, nullable=False),
        sa.Column("revoked", _TIME),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feedback_links")),
        sa.UniqueConstraint("digest", name=op.f("uq_feedback_links_digest")),
    )
    op.create_index(op.f("ix_feedback_links_project"), "feedback_links", ["project"])


def _jobs() -> None:
    op.create_table(
        "jobs",
        _number(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("agent", sa.String(39), nullable=False),
        sa.Column("template", sa.String(64), nullable=False),
        sa.Column("numbers", sa.JSON, nullable=False),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("request_key", sa.String(64)),
        sa.Column("by_whom", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("place", sa.String(32), nullable=False),
        sa.Column("cancelled_by", sa.String(64)),
        sa.Column("result", sa.JSON),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("began", _TIME),
        sa.Column("ended", _TIME),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sa.CheckConstraint(f"state IN ({_STATES})", name=op.f("ck_jobs_state")),
    )
    op.create_index("ix_jobs_agent", "jobs", ["project", "agent"])
    op.create_index("ix_jobs_state", "jobs", ["state", "place"])
    op.create_index("ix_jobs_request_key", "jobs", ["project", "request_key"], unique=True)
    op.create_table(
        "agent_policy_versions",
        _number(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("agent_id", sa.String(39), nullable=False),
        sa.Column("version", sa.String(32), nullable=False),
        sa.Column("model_path", sa.Text, nullable=False),
        sa.Column("reward_model_path", sa.Text, nullable=False),
        sa.Column("feedback_count", sa.BigInteger, nullable=False),
        sa.Column("reward_mean", sa.Double),
        sa.Column("reward_std", sa.Double),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_agent_policy_versions")),
        sa.UniqueConstraint("id", name=op.f("uq_agent_policy_versions_id")),
    )
    columns = ["project", "agent_id", "version"]
    op.create_index("ix_agent_policy_versions_label", "agent_policy_versions", columns, unique=True)


def _conversations() -> None:
    op.create_table(
        "agent_conversations",
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("agent", sa.String(39), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("conversation", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint(
            "project", "agent", "version", "conversation", name=op.f("pk_agent_conversations")
        ),
    )
    op.create_table(
        "project_usage",
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("conversations", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_project_usage")),
    )
