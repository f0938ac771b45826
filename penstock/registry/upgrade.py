"""Bring the tables of a database to this program's version, or refuse them when they are of another one."""

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
from penstock.registry.registry_errors import SchemaMismatch

_LOCK: Final = 0x70656E73
"""PostgreSQL's advisory lock under which the tables change: several processes may open a database at once."""

_ONE_AT_A_TIME = threading.Lock()
"""Alembic keeps its state in globals of the process, so that one thread at a time may migrate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The revisions of one kind of database.

    migrations: alembic's folder. version_table: where a database of this kind notes its revision.
    remedy: what to do about tables that are absent or older.
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
        """Bring the tables up to this program's version with `migrate`, else check that they are.

        Raises SchemaMismatch for tables that are absent, older (without `migrate`) or newer, Unavailable.
        """
        if not migrate and database.file is not None and not database.file.exists():
            raise SchemaMismatch(f"{_named(database)}: no such file: {self.remedy}")
        if migrate:
            database.migrate(lambda connection: self.upgrade(connection, database))
        else:
            database.read(lambda session: self._check(session.connection(), database))

    def upgrade(self, connection: Connection, database: Database) -> None:
        """Bring the tables up to this program's version, within the caller's transaction."""
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if self._not_newer(connection, database) == self._revisions.head:
            return
        with _ONE_AT_A_TIME:
            command.upgrade(self.configuration(connection), "head")

    def is_older(self, connection: Connection) -> bool:
        """Return whether an earlier version of this program made the tables."""
        return self._current(connection) in self._revisions.known - {self._revisions.head}

    @property
    def _revisions(self) -> "_Revisions":
        return _read_revisions(self.migrations)

    def _check(self, connection: Connection, database: Database) -> None:
        found, head = self._not_newer(connection, database), self._revisions.head
        if found != head:
            raise SchemaMismatch(
                f"{_named(database)}: its tables are "
                f"{'absent' if found is None else f'of revision {found}'}, "
                f"this program needs {head}: {self.remedy}"
            )

    def _not_newer(self, connection: Connection, database: Database) -> str | None:
        """Return the revision of the tables, None for none; raises SchemaMismatch for an unknown one."""
        found = self._current(connection)
        if found is not None and found not in self._revisions.known:
            raise SchemaMismatch(
                f"{_named(database)}: its tables are of revision {found}, which this program does not know: "
                f"a newer Penstock made them; use that one, or another {database.called}"
            )
        return found

    def _current(self, connection: Connection) -> str | None:
        options: dict[str, Any] = {"version_table": self.version_table}
        return MigrationContext.configure(connection, opts=options).get_current_revision()


@dataclass(frozen=True, slots=True)
class _Revisions:
    """head: the newest one.   known: all of them."""

    head: str | None
    known: frozenset[str]


@cache
def _read_revisions(migrations: Path) -> _Revisions:
    """Run the scripts of a folder once: those of a program stay what they are while it runs."""
    config = Schema(migrations=migrations).configuration()
    scripts = ScriptDirectory.from_config(config)
    return _Revisions(
        scripts.get_current_head(), frozenset(script.revision for script in scripts.walk_revisions())
    )


def _named(database: Database) -> str:
    return f"{database.called} {database.shown}"


REGISTRY: Final = Schema(migrations=Path(__file__).parent / "migrations")
