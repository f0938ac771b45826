"""Ratings: whose they are, of which run, with which note, and under which key they came."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; ratings of before belong to no project and no rater."""
    for name, length in (("public_id", 32), ("project", 24), ("run", 64), ("rater", 32)):
        op.add_column("ratings", sa.Column(name, sa.String(length), nullable=False, server_default=""))
    op.add_column("ratings", sa.Column("notes", sa.Text, nullable=False, server_default=""))
    op.add_column("ratings", sa.Column("request_key", sa.String(64)))
    op.create_index("ix_ratings_rater", "ratings", ["project", "rater"])
    op.create_index("ix_ratings_request_key", "ratings", ["policy", "request_key"], unique=True)


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_ratings_request_key", "ratings")
    op.drop_index("ix_ratings_rater", "ratings")
    for name in ("request_key", "notes", "rater", "run", "project", "public_id"):
        op.drop_column("ratings", name)
