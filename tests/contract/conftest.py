"""Fixtures of contract tests: the sides of a run in Redis, on each server found, and PostgreSQL."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.store import Store
from tests.support.run.store_run import Begin, open_run
from tests.support.storage.postgresql_server import PostgresqlServer, find_programs


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    made = Store.connect(redis_url)
    yield made
    await made.aclose()


@pytest.fixture
def begin(redis_url: str) -> Iterator[Begin]:
    with ExitStack() as opened:
        yield lambda **options: opened.enter_context(closing(open_run(redis_url, **options)))


@pytest.fixture
def log(begin: Begin) -> LearnerLog:
    """The side of a learner that opened the run and published version 1."""
    return begin()


@pytest.fixture
def raw(redis_url: str) -> Iterator["redis.Redis"]:
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
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
