from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from tests.support.gateway.gateway_stand import new_token
from tests.support.storage.postgresql_server import own_server


@pytest.fixture
def token(tmp_path: Path) -> str:
    """A token of an editor of `alpha`."""
    return new_token(tmp_path, "alpha")


@pytest.fixture
def shared_database() -> Iterator[str]:
    """An empty database of a PostgreSQL server."""
    with own_server() as server:
        yield server.new_database("gateway")
