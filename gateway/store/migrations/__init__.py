"""Migrations of the gateway's tables from one version to the next (alembic)."""
