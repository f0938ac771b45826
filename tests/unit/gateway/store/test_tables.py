"""The tables of a gateway are made once, and refused where they are of another revision."""

import sqlite3
from pathlib import Path

import pytest

from penstock.gateway.store.tables import GATEWAY, Base, Role, open_database
from penstock.registry.records import SchemaMismatch
from penstock.registry.registry import Database, Registry


def tables(file: Path) -> dict[str, list[str]]:
    """The words of what SQLite was told to make, by name."""
    made = sqlite3.connect(file).execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {
        name: sorted(sql.replace(",", " ").replace("(", " ( ").replace(")", " ) ").split())
        for name, sql in made
        if name != GATEWAY.version_table
    }


def test_the_tables_are_those_of_the_models(tmp_path: Path) -> None:
    open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=True).close()
    wanted = Database(f"sqlite:///{tmp_path}/b.sqlite")
    wanted.write(lambda session: Base.metadata.create_all(session.connection()))
    assert tables(tmp_path / "b.sqlite") == tables(tmp_path / "a.sqlite")


def test_a_registry_may_share_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/both.sqlite"
    open_database(url, migrate=True).close()
    Registry.open(url, migrate=True).close()
    open_database(url, migrate=False).close()
    Registry.open(url).close()


def test_a_database_without_tables_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match=r"accounts database .*: no such file: start `penstock gateway`"):
        open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=False)


def test_tables_of_another_revision_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    open_database(f"sqlite:///{file}", migrate=True).close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE gateway_version SET version_num = '0007'")
    connection.close()
    message = (
        rf"accounts database .*{file}: its tables are of revision 0007, this program needs 0008: use the "
        "Penstock that made them, or another accounts database"
    )
    with pytest.raises(SchemaMismatch, match=message):
        open_database(f"sqlite:///{file}", migrate=True)


def test_roles_include_those_below() -> None:
    assert [[one.includes(other) for other in Role] for one in Role] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
