import sqlite3
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session

from penstock.registry import ratings
from penstock.registry.database import Database, parse_url
from penstock.registry.models import Base, RatingRow, RatingUsageRow
from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.registry.registry_errors import SchemaMismatch
from penstock.registry.upgrade import REGISTRY


def tables(file: Path) -> dict[str, str]:
    """What SQLite was told to make, by name."""
    made = sqlite3.connect(file).execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {name: " ".join(sql.split()) for name, sql in made if name != "alembic_version"}


def migrated(file: Path) -> Database:
    """A database with the tables that the migrations make."""
    Registry.open(f"sqlite:///{file}", migrate=True).close()
    return Database(f"sqlite:///{file}")


def test_models_and_migrations_agree(tmp_path: Path) -> None:
    """Alembic finds nothing to migrate."""
    database = migrated(tmp_path / "a.sqlite")
    found = database.read(
        lambda session: compare_metadata(MigrationContext.configure(session.connection()), Base.metadata)
    )
    assert [] == found


def words(sql: str) -> list[str]:
    """Of a statement, without order: constraints may stand in any."""
    return sorted(sql.replace(",", " ").replace("(", " ( ").replace(")", " ) ").split())


def test_checks_and_partial_indexes_agree_too(tmp_path: Path) -> None:
    """Alembic looks at neither: here the statements that make the tables are compared."""
    migrated(tmp_path / "a.sqlite").close()
    models = Database(f"sqlite:///{tmp_path}/b.sqlite")
    models.write(lambda session: Base.metadata.create_all(session.connection()))
    made, wanted = tables(tmp_path / "a.sqlite"), tables(tmp_path / "b.sqlite")
    assert set(made) == set(wanted)
    for name, sql in wanted.items():
        assert words(sql) == words(made[name]), name


def test_there_is_one_line_of_revisions_and_each_goes_back(tmp_path: Path) -> None:
    """Down to nothing and up again."""
    scripts = ScriptDirectory.from_config(REGISTRY.configuration())
    assert 1 == len(scripts.get_heads())
    database = migrated(tmp_path / "a.sqlite")

    def down_and_up(session: Session) -> None:
        connection = session.connection()
        command.downgrade(REGISTRY.configuration(connection), "base")
        REGISTRY.upgrade(connection, database)

    before = tables(tmp_path / "a.sqlite")
    database.write(down_and_up)
    assert before == tables(tmp_path / "a.sqlite")


def test_ratings_of_before_are_counted_by_project(tmp_path: Path) -> None:
    """With the length of their texts; those of no project are not."""
    database = migrated(tmp_path / "a.sqlite")
    said: dict[str, Any] = {"prompt": "four", "response": "to", "notes": "!"}

    def fill(session: Session) -> None:
        ratings.add(session, "a/x", [Rating(**said, score=0.5, project="a")] * 2)
        ratings.add(session, "b/x", [Rating(**said, rejected="other", project="b")])
        ratings.add(session, "c", [Rating(**said, score=0.5)])

    def usage(session: Session) -> dict[str, tuple[int, int]]:
        return {row.project: (row.ratings, row.text_bytes) for row in session.scalars(select(RatingUsageRow))}

    database.write(fill)
    assert database.read(usage) == {"a": (2, 14), "b": (1, 12)}

    def down_and_up(session: Session) -> None:
        command.downgrade(REGISTRY.configuration(session.connection()), "0009")
        REGISTRY.upgrade(session.connection(), database)

    database.write(down_and_up)
    # A prompt is stored as JSON, with its quotation marks.
    assert database.read(usage) == {"a": (2, 18), "b": (1, 14)}
    database.write(lambda session: ratings.delete(session, "a", ""))
    assert database.read(usage) == {"a": (0, 0), "b": (1, 14)}


def test_ratings_of_a_program_of_before_beside_it_are_not_counted_down(tmp_path: Path) -> None:
    """It went on after the tables were changed, and stored ratings that nobody has counted."""
    database = migrated(tmp_path / "a.sqlite")
    said: dict[str, Any] = {"prompt": "four", "response": "to", "score": 0.5}

    def fill(session: Session) -> None:
        ratings.add(session, "a/x", [Rating(**said, project="a", rater=one) for one in ("ann", "bob", "bob")])
        names = ("policy", "created", "prompt", "response", "score", "key", "source", "conversation")
        same = [RatingRow.__table__.c[name] for name in (*names, "project", "rater")]
        session.execute(insert(RatingRow).from_select(same, select(*same), include_defaults=False))

    def left(session: Session) -> list[tuple[int, int]]:
        return [(row.ratings, row.text_bytes) for row in session.scalars(select(RatingUsageRow))]

    database.write(fill)
    assert len(database.write(lambda session: ratings.delete(session, "a", "bob"))["a/x"]) == 4
    assert database.read(left) == [(1, 6)]


def test_opening_again_keeps_what_is_there(tmp_path: Path) -> None:
    """With migrations and without."""
    url = f"sqlite:///{tmp_path}/a.sqlite"
    for migrate in (True, True, False):
        with Registry.open(url, migrate=migrate) as registry:
            assert () == registry.list("default")


def test_tables_of_this_version_are_not_migrated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that starts again loads no scripts of alembic."""
    url = f"sqlite:///{tmp_path}/a.sqlite"
    Registry.open(url, migrate=True).close()
    asked: list[object] = []
    monkeypatch.setattr(command, "upgrade", lambda *arguments: asked.append(arguments))
    Registry.open(url, migrate=True).close()
    assert asked == []


def test_tables_that_are_absent_are_not_made_unasked(tmp_path: Path) -> None:
    """Nor is the file."""
    file = tmp_path / "a.sqlite"
    with pytest.raises(SchemaMismatch, match="no such file: open it once with migrate=True"):
        Registry.open(f"sqlite:///{file}")
    assert not file.exists()
    sqlite3.connect(file).execute("CREATE TABLE something (x)")
    with pytest.raises(SchemaMismatch, match="its tables are absent, this program needs 0010"):
        Registry.open(f"sqlite:///{file}")


@pytest.mark.parametrize("migrate", [True, False])
def test_tables_of_a_newer_program_are_refused(tmp_path: Path, migrate: bool) -> None:
    """And left as they are."""
    database = migrated(tmp_path / "a.sqlite")
    database.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(
        SchemaMismatch, match="revision 9999, which this program does not know: a newer Penstock"
    ):
        Registry.open(f"sqlite:///{tmp_path}/a.sqlite", migrate=migrate)


def test_the_migrations_travel_with_the_package() -> None:
    """They lie in packages, which a wheel holds."""
    folder = REGISTRY.migrations
    assert all((folder / name).exists() for name in ("__init__.py", "env.py", "script.py.mako"))
    assert (folder / "versions" / "__init__.py").exists()


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
    """Before anything is opened."""
    with pytest.raises(ValueError, match=message):
        parse_url(url)


def test_a_refused_url_shows_no_password() -> None:
    """Messages go to logs."""
    with pytest.raises(ValueError, match="mysql") as caught:
        parse_url("mysql://ada:secret@host/registry")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_the_usual_names_of_postgresql_are_understood(scheme: str) -> None:
    """They are all served by the one driver that is installed."""
    assert "postgresql+psycopg" == parse_url(f"{scheme}://host/registry").drivername
