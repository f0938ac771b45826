"""The first tables: people, projects, tokens, sessions and the audit."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make all tables."""
    _people()
    _tokens()
    _sessions()
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("project", sa.String(24)),
        sa.Column("by_whom", sa.String(64), nullable=False),
        sa.Column("action", sa.String(48), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_project"), "audit", ["project"])


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


def downgrade() -> None:
    """Drop all tables, with what they hold."""
    for table in (
        "audit",
        "attempts",
        "refresh_tokens",
        "sessions",
        "api_tokens",
        "invitations",
        "members",
        "projects",
        "users",
    ):
        op.drop_table(table)
