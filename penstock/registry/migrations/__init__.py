"""Migrations of a registry's tables from one version to the next (alembic)."""
