"""Ratings of responses: scores, and preferences between two responses."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "ratings",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger),
        sa.Column("conversation", sa.String(128), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("source", sa.String(128), nullable=False),
        sa.Column("prompt", sa.JSON, nullable=False),
        sa.Column("response", sa.Text, nullable=False),
        sa.Column("score", sa.Double),
        sa.Column("rejected", sa.Text),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_ratings")),
        sa.CheckConstraint("(score IS NULL) <> (rejected IS NULL)", name=op.f("ck_ratings_kind")),
    )
    op.create_index(op.f("ix_ratings_policy"), "ratings", ["policy"])


def downgrade() -> None:
    """Drop it, with what it holds."""
    op.drop_table("ratings")
