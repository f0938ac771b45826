"""Runs that share a policy: where the weights of a version lie, and which numbers a run may use."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, and make the table; versions of before lie in the folder of their run."""
    op.add_column("policy_versions", sa.Column("place", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "version_ranges",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("policy", "run", name=op.f("pk_version_ranges")),
    )
    op.create_index("ix_version_ranges_first", "version_ranges", ["policy", "first"], unique=True)


def downgrade() -> None:
    """Drop them."""
    op.drop_table("version_ranges")
    op.drop_column("policy_versions", "place")
