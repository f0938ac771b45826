"""Links by which people without an account rate."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the table."""
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


def downgrade() -> None:
    """Drop the table, with what it holds."""
    op.drop_table("feedback_links")
