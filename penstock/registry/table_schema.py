"""The tables of a database: made where there are none, refused where they are of another revision."""

import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from penstock.registry.database import Database
from penstock.registry.records import SchemaMismatch

_LOCK: Final = 0x70656E73
"""PostgreSQL's advisory lock under which the tables are made: several processes may open a database."""

_ONE_AT_A_TIME = threading.Lock()
"""Alembic keeps its state in globals of the process, so that one thread at a time may make tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The revision of one kind of database.

    migrations: alembic's folder. version_table: where a database of this kind notes its revision.
    remedy: what to do about tables that are absent.
    """

    migrations: Path
    version_table: str = "alembic_version"
    remedy: str = "open it once with migrate=True"

    def configuration(self, connection: Connection | None = None) -> Config:
        """Return alembic's configuration on an open connection; `alembic revision` works with the same."""
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(self.migrations).replace("%", "%%"))
        return config

    def open(self, database: Database, *, migrate: bool) -> None:
        """Make the tables with `migrate` where there are none, and check their revision."""
        if not migrate and database.file is not None and not database.file.exists():
            raise SchemaMismatch(f"{_named(database)}: no such file: {self.remedy}")
        if migrate:
            database.migrate(lambda connection: self._make(connection, database))
        else:
            database.read(lambda session: self._check(session.connection(), database))

    def _make(self, connection: Connection, database: Database) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if self._current(connection) is not None:
            self._check(connection, database)
            return
        with _ONE_AT_A_TIME:
            command.upgrade(self.configuration(connection), "head")

    def _check(self, connection: Connection, database: Database) -> None:
        found, own = self._current(connection), _revision(self.migrations)
        if found is None:
            raise SchemaMismatch(
                f"{_named(database)}: its tables are absent, this program needs {own}: {self.remedy}"
            )
        if found != own:
            raise SchemaMismatch(
                f"{_named(database)}: its tables are of revision {found}, this program needs {own}: use the "
                f"Penstock that made them, or another {database.called}"
            )

    def _current(self, connection: Connection) -> str | None:
        options: dict[str, Any] = {"version_table": self.version_table}
        return MigrationContext.configure(connection, opts=options).get_current_revision()


@cache
def _revision(migrations: Path) -> str | None:
    """Run the scripts of a folder once: those of a program stay what they are while it runs."""
    return ScriptDirectory.from_config(Schema(migrations=migrations).configuration()).get_current_head()


def _named(database: Database) -> str:
    return f"{database.called} {database.shown}"


REGISTRY: Final = Schema(migrations=Path(__file__).parent / "migrations")
