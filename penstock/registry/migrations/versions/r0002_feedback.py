"""Rewards that came after their step was sent to the learner."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "feedback",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("episode", sa.String(128), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("amount", sa.Double, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_feedback")),
    )
    op.create_index(op.f("ix_feedback_episode"), "feedback", ["episode"])


def downgrade() -> None:
    """Drop it, with what it holds."""
    op.drop_table("feedback")
