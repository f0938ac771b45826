"""Opens the gateway's own database: SQLite for one gateway, PostgreSQL where several share it."""

from pathlib import Path
from typing import Final

from penstock.registry.database import Database, Schema

GATEWAY: Final = Schema(
    migrations=Path(__file__).parent / "migrations",
    version_table="gateway_version",  # a registry in the same PostgreSQL database keeps its own
    remedy="start `penstock gateway` once, which makes them",
)


def open_database(url: str, *, migrate: bool) -> Database:
    """Return the database at `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.

    Args:
        url: of the database.
        migrate: make the tables where there are none.

    Raises:
        SchemaMismatch: the tables are absent (without `migrate`) or of another revision.
        Unavailable: the database does not answer.
        ValueError: the URL is of another kind.
    """
    database = Database(url, "accounts database")
    try:
        GATEWAY.open(database, migrate=migrate)
    except BaseException:
        database.close()
        raise
    return database
