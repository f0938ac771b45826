"""The first tables: policy versions, their traffic, and the audit of both."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make all tables."""
    _policy_versions()
    op.create_table(
        "traffic",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("experiment", sa.String(64), nullable=False),
        sa.Column("canary_share", sa.Double, nullable=False),
        sa.Column("latest_share", sa.Double, nullable=False),
        sa.Column("shadow", sa.BigInteger),
        sa.Column("pins", sa.JSON, nullable=False),
        sa.Column("changed", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("policy", name=op.f("pk_traffic")),
        sa.CheckConstraint(
            "canary_share >= 0 AND latest_share >= 0 AND canary_share + latest_share <= 1",
            name=op.f("ck_traffic_shares"),
        ),
    )
    op.create_table(
        "events",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("by_whom", sa.String(128), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_events")),
        sa.CheckConstraint(
            "action IN ('registered', 'evaluated', 'promoted', 'rolled_back', 'retired', 'traffic')",
            name=op.f("ck_events_action"),
        ),
    )
    op.create_index(op.f("ix_events_policy"), "events", ["policy"])


def _policy_versions() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("parent", sa.BigInteger),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("update_count", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("configuration", sa.String(64), nullable=False),
        sa.Column("evaluation", sa.JSON),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("standby", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", name=op.f("pk_policy_versions")),
        sa.CheckConstraint("NOT standby OR status = 'retired'", name=op.f("ck_policy_versions_standby")),
        sa.CheckConstraint(
            "origin IN ('best', 'periodic', 'final', 'rollback', 'import')",
            name=op.f("ck_policy_versions_origin"),
        ),
        sa.CheckConstraint(
            "status IN ('candidate', 'canary', 'active', 'retired', 'rolled_back')",
            name=op.f("ck_policy_versions_status"),
        ),
    )
    for name, condition in (
        ("active", "status = 'active'"),
        ("canary", "status = 'canary'"),
        ("standby", "standby"),
    ):
        op.create_index(
            f"one_{name}",
            "policy_versions",
            ["policy"],
            unique=True,
            sqlite_where=sa.text(condition),
            postgresql_where=sa.text(condition),
        )


def downgrade() -> None:
    """Drop all tables, with what they hold."""
    for table in ("events", "traffic", "policy_versions"):
        op.drop_table(table)
