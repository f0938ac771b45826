"""Late rewards: under which key they came, so that one that is sent again is stored once."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; rewards of before came without a key."""
    op.add_column("feedback", sa.Column("request_key", sa.String(64)))
    op.create_index("ix_feedback_request_key", "feedback", ["policy", "request_key"], unique=True)


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_feedback_request_key", "feedback")
    op.drop_column("feedback", "request_key")
