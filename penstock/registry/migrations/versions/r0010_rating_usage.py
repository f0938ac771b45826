"""How many ratings each project has, and of how much text."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_TEXTS = ("prompt", "response", "rejected", "notes")


def upgrade() -> None:
    """Count those that there are; of their texts characters are counted, which are bytes or a little less."""
    op.add_column("ratings", sa.Column("text_bytes", sa.BigInteger, nullable=False, server_default="0"))
    usage = op.create_table(
        "rating_usage",
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("ratings", sa.BigInteger, nullable=False),
        sa.Column("text_bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_rating_usage")),
    )
    ratings = sa.table("ratings", *map(sa.column, ("project", "text_bytes", *_TEXTS)))
    lengths = [sa.func.coalesce(sa.func.length(sa.cast(ratings.c[name], sa.Text)), 0) for name in _TEXTS]
    total = lengths[0] + lengths[1] + lengths[2] + lengths[3]
    op.execute(sa.update(ratings).values(text_bytes=total))
    counted = sa.select(ratings.c.project, sa.func.count(), sa.func.sum(ratings.c.text_bytes))
    counted = counted.where(ratings.c.project != "").group_by(ratings.c.project)
    op.execute(sa.insert(usage).from_select(["project", "ratings", "text_bytes"], counted))


def downgrade() -> None:
    """Drop them."""
    op.drop_table("rating_usage")
    op.drop_column("ratings", "text_bytes")
