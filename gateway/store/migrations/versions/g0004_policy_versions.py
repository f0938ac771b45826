"""Policies that jobs trained."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "agent_policy_versions",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("agent_id", sa.String(39), nullable=False),
        sa.Column("version", sa.String(32), nullable=False),
        sa.Column("model_path", sa.Text, nullable=False),
        sa.Column("reward_model_path", sa.Text, nullable=False),
        sa.Column("feedback_count", sa.BigInteger, nullable=False),
        sa.Column("reward_mean", sa.Double),
        sa.Column("reward_std", sa.Double),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_agent_policy_versions")),
        sa.UniqueConstraint("id", name=op.f("uq_agent_policy_versions_id")),
    )
    columns = ["project", "agent_id", "version"]
    op.create_index("ix_agent_policy_versions_label", "agent_policy_versions", columns, unique=True)


def downgrade() -> None:
    """Drop the table, with what it holds."""
    op.drop_table("agent_policy_versions")
