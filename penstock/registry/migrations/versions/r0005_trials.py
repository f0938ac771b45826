"""Trials of canaries: the state of each policy's, and the clients that were compared in it."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "trials",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("trial", sa.String(160), nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("changed", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("policy", name=op.f("pk_trials")),
    )
    op.create_table(
        "trial_clients",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("client", sa.String(16), nullable=False),
        sa.Column("level", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("policy", "client", "level", name=op.f("pk_trial_clients")),
    )


def downgrade() -> None:
    """Drop them, with what they hold."""
    op.drop_table("trial_clients")
    op.drop_table("trials")
