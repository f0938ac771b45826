"""What the migrations make is what the tables say."""

import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.orm import Session

from gateway.store.accounts_database import GATEWAY, open_database
from gateway.store.tables import ApiTokenRow, Base, ConversationRow, FeedbackLinkRow, ProjectUsageRow, Role
from penstock.registry.database import Database
from penstock.registry.registry import Registry
from penstock.registry.registry_errors import SchemaMismatch


def tables(file: Path) -> dict[str, list[str]]:
    """The words of what SQLite was told to make, by name."""
    made = sqlite3.connect(file).execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {
        name: sorted(sql.replace(",", " ").replace("(", " ( ").replace(")", " ) ").split())
        for name, sql in made
        if name != GATEWAY.version_table
    }


def test_tables_and_migrations_agree(tmp_path: Path) -> None:
    """Alembic finds nothing to migrate, and checks are the same, which it does not look at."""
    database = open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=True)
    options = {"version_table": GATEWAY.version_table}
    found = database.read(
        lambda session: compare_metadata(
            MigrationContext.configure(session.connection(), opts=options), Base.metadata
        )
    )
    assert [] == found
    wanted = Database(f"sqlite:///{tmp_path}/b.sqlite")
    wanted.write(lambda session: Base.metadata.create_all(session.connection()))
    assert tables(tmp_path / "b.sqlite") == tables(tmp_path / "a.sqlite")


def test_each_revision_goes_back(tmp_path: Path) -> None:
    """Down to nothing and up again."""
    database = open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=True)

    def down_and_up(session: Session) -> None:
        connection = session.connection()
        command.downgrade(GATEWAY.configuration(connection), "base")
        GATEWAY.upgrade(connection, database)

    before = tables(tmp_path / "a.sqlite")
    database.write(down_and_up)
    assert before == tables(tmp_path / "a.sqlite")


def test_links_of_tokens_that_were_revoked_end_with_an_upgrade(tmp_path: Path) -> None:
    """Those of others, and one that was revoked itself, are as they were."""
    database = open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=True)
    day = [datetime(2026, 11, number, tzinfo=UTC) for number in range(1, 5)]
    token: Any = {"project": "alpha", "name": "ci", "role": Role.EDITOR, "by": "user/1", "created": day[0]}
    link: Any = {"project": "alpha", "agent": "a", "items": [], "rater": "", "created": day[0]}
    makers = {"gone": None, "counts": None, "before": day[1]}

    def fill(session: Session) -> None:
        command.downgrade(GATEWAY.configuration(session.connection()), "0006")
        session.add_all(
            ApiTokenRow(id=name, digest=name, expires=None, revoked=when, **token)
            for name, when in (("gone", day[2]), ("counts", None), ("before", day[2]))
        )
        session.add_all(
            FeedbackLinkRow(id=by, digest=by, by=f"token/{by}", expires=day[3], revoked=when, **link)
            for by, when in makers.items()
        )
        session.flush()
        GATEWAY.upgrade(session.connection(), database)

    database.write(fill)
    found = database.read(
        lambda session: {one.id: one.revoked for one in session.query(FeedbackLinkRow).all()}
    )
    assert found == {"gone": day[2], "counts": None, "before": day[1]}


def test_conversations_of_before_are_counted_with_an_upgrade(tmp_path: Path) -> None:
    """By project."""
    database = open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=True)

    def fill(session: Session) -> None:
        command.downgrade(GATEWAY.configuration(session.connection()), "0007")
        told = (("a", "x"), ("a", "y"), ("b", "x"))
        session.add_all(
            ConversationRow(project=project, agent="mine", version=1, conversation=name)
            for project, name in told
        )
        session.flush()
        GATEWAY.upgrade(session.connection(), database)

    database.write(fill)
    found = database.read(
        lambda session: {one.project: one.conversations for one in session.query(ProjectUsageRow).all()}
    )
    assert found == {"a": 2, "b": 1}


def test_a_registry_may_share_the_database(tmp_path: Path) -> None:
    """Each notes its revision in a table of its own."""
    url = f"sqlite:///{tmp_path}/both.sqlite"
    open_database(url, migrate=True).close()
    Registry.open(url, migrate=True).close()
    open_database(url, migrate=False).close()
    Registry.open(url).close()


def test_a_database_without_tables_says_what_to_do(tmp_path: Path) -> None:
    """The message names the kind of database."""
    with pytest.raises(SchemaMismatch, match=r"accounts database .*: no such file: start `penstock gateway`"):
        open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=False)


def test_roles_include_those_below() -> None:
    """And none above."""
    assert [[one.includes(other) for other in Role] for one in Role] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
