"""Fixtures: a gateway on each kind of database."""

from itertools import count
from pathlib import Path

import pytest

from tests.support.storage.postgresql_server import DATABASES, PostgresqlServer

pytest.importorskip("argon2", reason="the gateway needs its extra")

from argon2 import PasswordHasher

from penstock.gateway.accounts import users
from tests.support.gateway.small_gateway import SmallGateway

_numbers = count()


@pytest.fixture(autouse=True)
def quick_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of little memory; what a hash costs in earnest is tested in `tests/unit/gateway/accounts`."""
    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(users, "_hasher", hasher)
    monkeypatch.setattr(users, "_nobodys", hasher.hash("of no account"))


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/accounts.sqlite"
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.new_database(f"gateway{next(_numbers)}")


@pytest.fixture
def small_gateway(database_url: str, tmp_path: Path) -> SmallGateway:
    """A gateway; on PostgreSQL its registry is in the same database."""
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    return SmallGateway.at(database_url, registry, tmp_path)
