"""All tables of a registry, as `models` has them; a change of them needs a revision that writes them out."""

from alembic import op

from penstock.registry.models import Base

revision = "0010"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    Base.metadata.create_all(op.get_bind())
