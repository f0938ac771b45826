"""All tables of a gateway, as `tables` has them; a change of them needs a revision that writes them out."""

from alembic import op

from penstock.gateway.store.tables import Base

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make all tables."""
    Base.metadata.create_all(op.get_bind())
