"""The revision that makes a registry's tables (alembic)."""
