"""A Redis that is still loading its append-only file: waited for, not called forgetful."""

import asyncio
from collections import Counter
from pathlib import Path

import redis
from redis import asyncio as redis_asyncio
from redis.exceptions import BusyLoadingError, RedisError

from penstock.broker.log import connection
from penstock.config.settings import BrokerSection
from penstock.protocol.messages import Durability
from tests.support.storage.redis_server import Binary, RedisServer

KEYS = 6000
SLOWLY = ("--key-load-delay", "300")
"""Microseconds for each key; it answers between a thousand and the next."""


async def looks_while_it_starts(server: RedisServer) -> Counter[str]:
    """What the guard said, again and again until the server has started: the name of an error, or a level."""
    said: Counter[str] = Counter()
    client = redis_asyncio.Redis.from_url(server.url)
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    while not starting.done():
        try:
            facts = await connection.examine(client, server.url, BrokerSection())
            said[facts.durability.name] += 1
        except RedisError as error:
            said[type(error).__name__] += 1
        await asyncio.sleep(0.01)
    await starting
    facts = await connection.examine(client, server.url, BrokerSection())
    said[facts.durability.name] += 1
    await client.aclose()
    return said


async def test_a_redis_that_loads_its_file_is_waited_for(redis_binary: Binary, short_folder: Path) -> None:
    first = RedisServer(redis_binary, short_folder)
    first.start()
    with redis.Redis.from_url(first.url) as client:
        for key in range(KEYS):
            client.set(f"key-{key}", key)
    first.kill()
    server = RedisServer(redis_binary, short_folder, *SLOWLY)
    try:
        said = await looks_while_it_starts(server)
    finally:
        server.kill()
    assert said[BusyLoadingError.__name__] > 0, said
    assert said[Durability.FSYNC_1S.name] > 0, said
    assert Durability.MEMORY.name not in said
