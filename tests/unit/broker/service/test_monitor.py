"""What a look at Redis tells Prometheus."""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.log import connection
from penstock.broker.log.connection import connect_async
from penstock.broker.log.store import Store
from penstock.broker.service.process import Monitor
from penstock.config.settings import BrokerSection
from penstock.runtime import metrics
from penstock.runtime.health import Health
from tests.support.run.store_run import PACING, open_run


def told(name: str) -> float:
    """The gauge at /metrics."""
    found = re.search(rf"^penstock_{name} (\S+)$", metrics.exposition("broker").decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


class Look:
    """A monitor of a real Redis; `changed` are facts that the test makes up."""

    def __init__(self, url: str) -> None:
        self.changed: dict[str, Any] = {}
        self.redis, self.store, self._url = connect_async(url, None), Store.connect(url), url
        section = BrokerSection()
        self.monitor = Monitor(self.store, Health("broker"), section, self._examine, lambda _facts: None)

    async def _examine(self) -> connection.ServerFacts:
        facts = await connection.examine(self.redis, self._url, BrokerSection())
        return replace(facts, **self.changed)


@pytest.fixture
async def look(redis_url: str) -> AsyncIterator[Look]:
    """Of the test's own server."""
    made = Look(redis_url)
    yield made
    await made.redis.aclose()
    await made.store.aclose()


async def test_redis_tells_its_memory_and_its_clients(look: Look) -> None:
    await look.monitor.look()
    info = await look.redis.info()
    assert told("redis_memory_bytes") == pytest.approx(info["used_memory"], rel=0.5)
    assert told("redis_memory_limit_bytes") == info["maxmemory"]
    assert told("redis_clients") >= 1
    assert told("redis_up") == 1


async def test_the_ceilings_are_those_that_the_learner_has_set(look: Look, redis_url: str) -> None:
    await look.monitor.look()
    assert told("log_ceiling_bytes") == 0
    open_run(redis_url)
    await look.monitor.look()
    assert told("log_ceiling_bytes") == PACING.max_log_bytes
    assert told("log_ceiling_entries") == PACING.max_log_entries


@pytest.mark.parametrize(
    ("fact", "name", "up"),
    [("cannot_persist", "redis_write_failing", 0), ("cannot_rewrite", "redis_rewrite_failing", 1)],
)
async def test_a_file_that_cannot_be_written_is_told_until_it_can(
    look: Look, fact: str, name: str, up: int
) -> None:
    look.changed = {fact: True}
    await look.monitor.look()
    assert (told(name), told("redis_up")) == (1, up)
    look.changed = {}
    await look.monitor.look()
    assert (told(name), told("redis_up")) == (0, 1)


@pytest.mark.parametrize(
    ("field", "fact"),
    [("aof_last_write_status", "cannot_persist"), ("aof_last_bgrewrite_status", "cannot_rewrite")],
)
async def test_the_guard_reads_what_redis_says_of_its_file(look: Look, field: str, fact: str) -> None:
    info = await look.redis.info()

    class Failing:
        """The same server, whose disk is full."""

        config_get = staticmethod(look.redis.config_get)
        execute_command = staticmethod(look.redis.execute_command)
        acl_getuser = staticmethod(look.redis.acl_getuser)

        @staticmethod
        async def info() -> dict[str, object]:
            """With the status that Redis gives then."""
            return {**info, field: "err"}

    facts = await connection.examine(Failing(), "unix:///redis", BrokerSection())  # type: ignore[arg-type]
    assert getattr(facts, fact)
