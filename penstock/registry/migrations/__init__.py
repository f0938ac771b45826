"""What brings the tables of a registry from one version to the next (alembic)."""
