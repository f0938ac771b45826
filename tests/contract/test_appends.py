"""Appends that come while others are under way go together, and each gets its own reply."""

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from penstock.broker.log import line
from penstock.broker.log.connection import ServerFacts
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.broker.service.experience_service import Admission, ExperienceService, StagingLimit
from penstock.broker.service.sessions import Changes, LastCredit, SessionOwners
from penstock.protocol.append import encode, parse
from penstock.protocol.messages import Durability, Role
from penstock.protocol.refusal import Reason
from penstock.runtime import metrics
from tests.support.run.small_run import CHARGE, fragment
from tests.support.run.store_run import Actor, item, open_run, reconnect
from tests.support.storage.redis_server import PATIENCE_S, RedisServer

MANY = 40


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Appends in each pipeline."""
    counts: list[int] = []
    write = line.Appends._write

    def counted(self: line.Appends, batch: Sequence[Any]) -> None:
        counts.append(len(batch))
        write(self, batch)

    monkeypatch.setattr(line.Appends, "_write", counted)
    return counts


async def servers(store: Store, count: int) -> list[Actor]:
    """So many who need no credit, their sessions open."""
    actors = [Actor(store, f"server-{i}", role=Role.SERVER) for i in range(count)]
    for actor in actors:
        await actor.open()
    return actors


async def test_what_comes_together_goes_together(store: Store, redis_url: str, sent: list[int]) -> None:
    log = open_run(redis_url, budget=1000 * CHARGE)
    actors = await servers(store, MANY)
    replies = await asyncio.gather(*(actor.append(1 + i % 3) for i, actor in enumerate(actors)))
    assert [reply.acked_through for reply in replies] == [1 + i % 3 for i in range(MANY)]
    assert sum(sent) == MANY
    assert len(sent) == 1
    headers = [entry.header for entry in log.read(0, 1000, 0) if entry.header is not None]
    for actor in actors:
        own = [header.sequence for header in headers if header.session == actor.session]
        assert own == list(range(1, actor.acked + 1))
    log.close()


async def test_one_who_comes_alone_is_sent_alone(store: Store, redis_url: str, sent: list[int]) -> None:
    log = open_run(redis_url, budget=1000 * CHARGE)
    (actor,) = await servers(store, 1)
    for _ in range(3):
        await actor.append()
    assert sent == [1, 1, 1]
    log.close()


async def test_no_pipeline_is_longer_than_its_bounds(
    store: Store, redis_url: str, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_run(redis_url, budget=1000 * CHARGE)
    actors = await servers(store, MANY)
    size = len(item(actors[0].session, 1).payload)
    monkeypatch.setattr(line, "MOST_CALLS", 8)
    await asyncio.gather(*(actor.append() for actor in actors))
    assert max(sent) == 8
    sent.clear()
    monkeypatch.setattr(line, "MOST_BYTES", 3 * size)
    await asyncio.gather(*(actor.append() for actor in actors))
    assert max(sent) == 3
    sent.clear()
    monkeypatch.setattr(line, "MOST_BYTES", size - 1)
    await asyncio.gather(*(actor.append() for actor in actors))
    assert set(sent) == {1}
    assert all(actor.acked == 3 for actor in actors)
    log.close()


async def test_a_refusal_is_for_its_own_caller(store: Store, redis_url: str) -> None:
    log = open_run(redis_url, budget=1000 * CHARGE)
    actors = await servers(store, 6)
    gap, unknown, again = actors[1], actors[3], actors[5]
    await again.append()
    replies = await asyncio.gather(
        actors[0].append(),
        store.append(gap.session, 0, [item(gap.session, 2)]),
        actors[2].append(),
        store.append(unknown.session + 1000, 0, [item(unknown.session + 1000, 1)]),
        actors[4].append(),
        store.append(again.session, 0, [item(again.session, 1)]),
    )
    reasons = [reply.refusal.reason if reply.refusal else None for reply in replies]
    assert reasons == [None, Reason.GAP, None, Reason.EXPIRED, None, None]
    assert [reply.appended for reply in replies] == [1, 0, 1, 0, 1, 0]
    assert len(log.read(0, 100, 0)) == 4
    log.close()


async def test_all_are_told_when_redis_is_gone_and_served_when_it_is_back(
    redis_server: RedisServer, store: Store
) -> None:
    log = open_run(redis_server.url, budget=1000 * CHARGE)
    actors = await servers(store, MANY)
    redis_server.write_out()
    redis_server.kill()
    failed = await asyncio.gather(*(actor.append() for actor in actors), return_exceptions=True)
    assert {type(error) for error in failed} == {StoreUnavailable}
    redis_server.start()
    await reconnect(store)
    log.reopen(log.snapshot())
    await asyncio.gather(*(actor.append() for actor in actors))
    assert len(log.read(0, 100, 0)) == MANY
    log.close()


async def test_however_many_wait_all_are_told_that_redis_is_gone(
    redis_server: RedisServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "MOST_CALLS", 1)
    log = open_run(redis_server.url)
    (actor,) = await servers(store, 1)
    redis_server.write_out()
    await store.open()
    os.kill(redis_server.pid, signal.SIGSTOP)
    begun = [store.begin_append(actor.session, 0, [item(actor.session, 1)]) for _ in range(1000)]
    await asyncio.sleep(0)  # as many are under way as may be
    redis_server.kill()
    async with asyncio.timeout(PATIENCE_S):
        failed = await asyncio.gather(*begun, return_exceptions=True)
    assert {type(error) for error in failed} == {RedisConnectionError}
    redis_server.start()
    await reconnect(store)
    log.reopen(log.snapshot())
    async with asyncio.timeout(PATIENCE_S):
        assert (await actor.append()).acked_through == 1
    log.close()


async def test_scripts_that_redis_forgot_are_sent_whole(store: Store, redis_url: str) -> None:
    log = open_run(redis_url, budget=1000 * CHARGE)
    actors = await servers(store, 10)
    with redis.Redis.from_url(redis_url) as client:
        client.script_flush()
    replies = await asyncio.gather(*(actor.append(2) for actor in actors))
    assert [reply.acked_through for reply in replies] == [2] * 10
    log.close()


async def test_a_caller_that_is_cancelled_holds_up_no_other(store: Store, redis_url: str) -> None:
    log = open_run(redis_url, budget=1000 * CHARGE)
    actors = await servers(store, 8)
    await store.open()
    tasks = [asyncio.ensure_future(actor.append()) for actor in actors]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[5].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[5], asyncio.CancelledError)
    assert all(done[i].acked_through == 1 for i in range(8) if i not in (0, 5))  # type: ignore[union-attr]
    assert (await actors[1].append()).acked_through == 2
    assert len(log.read(0, 100, 0)) == 9
    log.close()


def serving(store: Store, *, ceiling_bytes: int) -> tuple[ExperienceService, Admission, StagingLimit]:
    """A broker's own part of an append."""
    staging = StagingLimit(ceiling_bytes)
    owners, admission = (
        SessionOwners(store.owner_of, store.confirm),
        Admission(store.specification, store.confirm),
    )
    facts = ServerFacts(version="7", durability=Durability.MEMORY, max_memory_bytes=0)
    service = ExperienceService(store, admission, staging, facts, owners, LastCredit(), Changes())
    return service, admission, staging


async def test_what_has_begun_is_waited_for_though_its_caller_is_gone(store: Store, redis_url: str) -> None:
    log = open_run(redis_url, budget=1000 * CHARGE)
    (actor,) = await servers(store, 1)
    await store.open()
    service, admission, staging = serving(store, ceiling_bytes=2**20)
    request = parse(encode(actor.session, 0, [fragment(actor.session, 1)]))
    await admission.admit(actor.session, request.fragments)  # the specification is known
    before = metrics.FRAGMENTS_APPENDED._value.get()
    call = asyncio.ensure_future(service.Append(request, None))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert staging.staged_bytes == len(request.fragments[0].payload)
    await service.finish_appends()
    assert staging.staged_bytes == 0
    assert metrics.FRAGMENTS_APPENDED._value.get() == before + 1
    assert len(log.read(0, 100, 0)) == 1
    log.close()


async def test_what_waits_for_a_connection_counts_as_staged(redis_server: RedisServer, store: Store) -> None:
    log = open_run(redis_server.url)
    (actor,) = await servers(store, 1)
    service, admission, staging = serving(store, ceiling_bytes=1)
    request = parse(encode(actor.session, 0, [fragment(actor.session, 1)]))
    await admission.admit(actor.session, request.fragments)  # the specification is known
    os.kill(redis_server.pid, signal.SIGSTOP)
    waits = asyncio.ensure_future(service.Append(request, None))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        refused = await service.Append(request, None)
    assert refused.refusal.detail.startswith("staging: ")
    assert not waits.done()
    redis_server.kill()
    assert (await waits).refusal.detail.startswith("redis: ")
    assert staging.staged_bytes == 0
    log.close()
