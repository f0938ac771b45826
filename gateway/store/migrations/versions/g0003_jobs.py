"""Jobs: trainings that people ask for."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_STATES = "'queued', 'running', 'finished', 'failed', 'cancelled', 'lost'"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "jobs",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("agent", sa.String(39), nullable=False),
        sa.Column("template", sa.String(64), nullable=False),
        sa.Column("numbers", sa.JSON, nullable=False),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("request_key", sa.String(64)),
        sa.Column("by_whom", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("place", sa.String(32), nullable=False),
        sa.Column("cancelled_by", sa.String(64)),
        sa.Column("result", sa.JSON),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("began", _TIME),
        sa.Column("ended", _TIME),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sa.CheckConstraint(f"state IN ({_STATES})", name=op.f("ck_jobs_state")),
    )
    op.create_index("ix_jobs_agent", "jobs", ["project", "agent"])
    op.create_index("ix_jobs_state", "jobs", ["state", "place"])
    op.create_index("ix_jobs_request_key", "jobs", ["project", "request_key"], unique=True)


def downgrade() -> None:
    """Drop the table, with what it holds."""
    op.drop_table("jobs")
