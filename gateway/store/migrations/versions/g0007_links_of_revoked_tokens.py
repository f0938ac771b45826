"""Links of tokens that were revoked before links ended with them."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Refuse them, from when their token was."""
    links = sa.table("feedback_links", sa.column("by_whom"), sa.column("revoked"))
    tokens = sa.table("api_tokens", sa.column("id"), sa.column("revoked"))
    makers = sa.literal("token/") + tokens.c.id == links.c.by_whom
    when = sa.select(tokens.c.revoked).where(makers).scalar_subquery()
    op.execute(sa.update(links).where(links.c.revoked.is_(None)).values(revoked=when))


def downgrade() -> None:
    """Leave them refused."""
