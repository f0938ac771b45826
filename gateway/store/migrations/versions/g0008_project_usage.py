"""How much each project has stored of what it may have a great many of."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Count the conversations that there are."""
    usage = op.create_table(
        "project_usage",
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("conversations", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_project_usage")),
    )
    told = sa.table("agent_conversations", sa.column("project"))
    counted = sa.select(told.c.project, sa.func.count()).group_by(told.c.project)
    op.execute(sa.insert(usage).from_select(["project", "conversations"], counted))


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("project_usage")
