"""Names that versions have beside their numbers, such as `v15`."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "version_labels",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("policy", "label", name=op.f("pk_version_labels")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("version_labels")
