"""Bring the tables to this program's version, or refuse them when they are of another one."""

import threading
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from penstock.registry.registry_errors import SchemaMismatch

MIGRATIONS: Final = Path(__file__).parent / "migrations"

_LOCK: Final = 0x70656E73
"""PostgreSQL's advisory lock under which the tables change: several processes may open a registry at once."""

_ONE_AT_A_TIME = threading.Lock()
"""Alembic keeps its state in globals of the process, so that one thread at a time may migrate."""


def configuration(connection: Connection | None = None) -> Config:
    """Return alembic's configuration on an open connection; `alembic revision` works with the same folder."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def upgrade(connection: Connection, shown: str) -> None:
    """Bring the tables up to this program's version, within the caller's transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    refuse_newer(connection, shown)
    with _ONE_AT_A_TIME:
        command.upgrade(configuration(connection), "head")


def check(connection: Connection, shown: str) -> None:
    """Raise SchemaMismatch unless the tables are exactly this program's."""
    refuse_newer(connection, shown)
    found = _current(connection)
    head = ScriptDirectory.from_config(configuration()).get_current_head()
    if found != head:
        raise SchemaMismatch(
            f"registry {shown}: its tables are {'absent' if found is None else f'of revision {found}'}, "
            f"this program needs {head}: open it once with migrate=True"
        )


def is_older(connection: Connection) -> bool:
    """Return whether an earlier version of this program made the tables."""
    found, script = _current(connection), ScriptDirectory.from_config(configuration())
    known = {one.revision for one in script.walk_revisions()}
    return found in known - {script.get_current_head()}


def refuse_newer(connection: Connection, shown: str) -> None:
    """Raise SchemaMismatch when a newer program made the tables."""
    found = _current(connection)
    known = {script.revision for script in ScriptDirectory.from_config(configuration()).walk_revisions()}
    if found is not None and found not in known:
        raise SchemaMismatch(
            f"registry {shown}: its tables are of revision {found}, which this program does not know: "
            "a newer Penstock made them; use that one, or another registry"
        )


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
