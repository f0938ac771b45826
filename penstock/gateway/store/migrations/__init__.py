"""The revision that makes the gateway's tables (alembic)."""
