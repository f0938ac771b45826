import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.storage.postgresql_server import PostgresqlServer, find_programs


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A running server."""
    programs = find_programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))
    server = PostgresqlServer(programs, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
