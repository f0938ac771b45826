import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.registry.records import SchemaMismatch
from penstock.registry.registry import REGISTRY, Database, Registry, parse_url

MADE_BEFORE = Path(__file__).parents[3] / "processes/train/solved_run/registry.sqlite"
"""A registry of revision 0010 that another program made."""


def tables(file: Path) -> dict[str, str]:
    """What SQLite was told to make, by name."""
    uri = f"file:{file}?mode=ro&immutable=1"
    made = sqlite3.connect(uri, uri=True).execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {name: " ".join(sql.split()) for name, sql in made}


def migrated(file: Path) -> Database:
    """A database with the tables that the revision makes."""
    Registry.open(f"sqlite:///{file}", migrate=True).close()
    return Database(f"sqlite:///{file}")


def words(sql: str) -> list[str]:
    """Of a statement, without order: constraints may stand in any."""
    return sorted(sql.replace(",", " ").replace("(", " ( ").replace(")", " ) ").split())


def test_tables_of_a_registry_from_before_are_those_of_the_models(tmp_path: Path) -> None:
    migrated(tmp_path / "registry.sqlite").close()
    made, before = tables(tmp_path / "registry.sqlite"), tables(MADE_BEFORE)
    assert set(made) == set(before)
    for name, sql in before.items():
        assert words(sql) == words(made[name]), name


def test_opening_again_keeps_what_is_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.sqlite"
    for migrate in (True, True, False):
        with Registry.open(url, migrate=migrate) as registry:
            assert () == registry.list("default")


def test_tables_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/a.sqlite"
    Registry.open(url, migrate=True).close()
    asked: list[object] = []
    monkeypatch.setattr(REGISTRY.tables, "create_all", lambda *arguments: asked.append(arguments))
    Registry.open(url, migrate=True).close()
    assert asked == []


def test_tables_that_are_absent_are_not_made_unasked(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    with pytest.raises(SchemaMismatch, match="no such file: open it once with migrate=True"):
        Registry.open(f"sqlite:///{file}")
    assert not file.exists()
    sqlite3.connect(file).execute("CREATE TABLE something (x)")
    with pytest.raises(SchemaMismatch, match="its tables are absent, this program needs 0010"):
        Registry.open(f"sqlite:///{file}")


@pytest.mark.parametrize("opened", [partial(Registry.open, migrate=True), Registry.open, Registry.read])
@pytest.mark.parametrize("revision", ["0009", "9999"])
def test_tables_of_another_revision_are_refused(
    tmp_path: Path, opened: Callable[[str], Registry], revision: str
) -> None:
    file = tmp_path / "a.sqlite"
    migrated(file).close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.close()
    before = file.read_bytes()
    message = (
        f"registry sqlite(.pysqlite)?:///{file}: its tables are of revision {revision}, this program needs "
        "0010: use the Penstock that made them, or another registry"
    )
    with pytest.raises(SchemaMismatch, match=message):
        opened(f"sqlite:///{file}")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "not a URL"),
        ("registry.sqlite", "not a URL"),
        ("mysql://host/registry", "'mysql' is not supported: use sqlite:///FILE or postgresql://"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_another_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_url(url)


def test_a_refused_url_shows_no_password() -> None:
    with pytest.raises(ValueError, match="mysql") as caught:
        parse_url("mysql://ada:secret@host/registry")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_the_usual_names_of_postgresql_are_understood(scheme: str) -> None:
    assert "postgresql+psycopg" == parse_url(f"{scheme}://host/registry").drivername
