"""Late rewards: whose they are, so that each caller keeps only so many."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; rows of before belong to callers without a name."""
    op.add_column("feedback", sa.Column("caller", sa.String(16), nullable=False, server_default=""))
    op.create_index("ix_feedback_caller", "feedback", ["caller", "number"])


def downgrade() -> None:
    """Drop the column."""
    op.drop_index("ix_feedback_caller", "feedback")
    op.drop_column("feedback", "caller")
