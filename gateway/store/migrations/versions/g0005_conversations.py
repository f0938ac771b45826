"""Conversations that versions of agents have had."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
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


def downgrade() -> None:
    """Drop the table, with what it holds."""
    op.drop_table("agent_conversations")
