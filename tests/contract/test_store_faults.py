import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis import asyncio as redis_asyncio
from redis.exceptions import BusyLoadingError, RedisError

from penstock.broker.log import connection, keys
from penstock.broker.log.connection import check_url
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Commit, Opened
from penstock.broker.log.script import MOST_STEP_MS
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.config.settings import BrokerSection, ConfigurationError
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Durability, Episode, Report, Role, Watch
from penstock.protocol.refusal import Reason, Refused
from penstock.runtime.exit import Fatal
from tests.support.run.small_run import CHARGE, RUN
from tests.support.run.store_run import PACING, TTL_MS, Actor, Begin, item, new_actor
from tests.support.storage.credit_stand import Clock, virtual_time
from tests.support.storage.redis_server import Binary, RedisServer


def test_a_learner_gives_up_on_a_dead_redis_after_its_time(redis_server: RedisServer) -> None:
    redis_server.kill()
    with pytest.raises(Fatal, match=r"did not answer for 0\.2 s"):
        LearnerLog.connect(redis_server.url, wait_s=0.2)


@pytest.mark.parametrize("password", ["wrong", None])
def test_a_password_that_redis_refuses_is_reported_by_the_learner(
    redis_url: str, password: str | None
) -> None:
    right = "right"
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("requirepass", right)
    with pytest.raises(ConfigurationError, match=r"security\.redis_password") as caught:
        LearnerLog.connect(redis_url, wait_s=20, password=password)
    assert "wrong" not in str(caught.value)
    LearnerLog.connect(redis_url, wait_s=20, password=right).close()


async def test_a_redis_that_refuses_writes_is_unavailable(store: Store, redis_url: str, begin: Begin) -> None:
    begin()
    actor = await new_actor(store)
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("min-replicas-to-write", 1)
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
            await actor.append()
        client.config_set("min-replicas-to-write", 0)
    assert (await actor.append()).refusal is None


async def test_cancelled_calls_leave_no_reply(store: Store, begin: Begin) -> None:
    log = begin(budget=10_000 * CHARGE, max_log_entries=100_000, max_log_bytes=2**30)
    actors = [Actor(store, f"actor-{index}") for index in range(4)]
    for actor in actors:
        await actor.open()
    luck = random.Random(0)

    async def work(actor: Actor) -> None:
        for _ in range(125):
            before = replace(actor)
            task = asyncio.ensure_future(actor.append())
            if luck.random() < 0.5:
                for _ in range(luck.randrange(6)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if task.cancelled():
                actor.acked, actor.credit = before.acked, before.credit
            watched = await store.watch(Watch(session=actor.session))
            assert watched.news is not None
            assert watched.news.credit.begin_through >= actor.acked

    await asyncio.gather(*(work(actor) for actor in actors))
    for actor in actors:
        sequence = (await actor.append()).acked_through
        headers = [entry.header for entry in log.read(0, 10_000, 0)]
        mine = [header.sequence for header in headers if header and header.session == actor.session]
        assert mine == list(range(1, sequence + 1))


async def test_two_stores_may_send_the_same_fragment_at_once(
    store: Store, redis_url: str, begin: Begin
) -> None:
    log = begin()
    other = Store.connect(redis_url)
    actor = await new_actor(store)
    for sequence in range(1, 5):
        replies = await asyncio.gather(
            *(
                one.append(actor.session, sequence - 1, [item(actor.session, sequence)])
                for one in (store, other)
            )
        )
        assert sorted(reply.appended for reply in replies) == [0, 1]
    assert log.residue(0).entries == 4
    await other.aclose()


@pytest.mark.parametrize("url", ["localhost:6379", "http://redis", ""])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="start the URL with one of redis://"):
        check_url(url)


@pytest.fixture
def log(begin: Begin) -> LearnerLog:
    return begin(budget=16 * CHARGE)


def _fill(client: "redis.Redis") -> None:
    client.config_set("maxmemory", 1024)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("other", b"x")


@pytest.mark.promise("maxmemory-learner-still-renew")
async def test_append_waits_and_stores_nothing(store: Store, log: LearnerLog, raw: "redis.Redis") -> None:
    actor = await new_actor(store)
    await actor.append()
    _fill(raw)
    reply = await actor.append(2)
    assert reply.refusal is not None
    assert (reply.refusal.reason, reply.acked_through) == (Reason.FULL, 1)
    assert reply.refusal.detail.startswith("staging")
    assert log.acked() == log.residue(0).entries == 1
    raw.config_set("maxmemory", 0)
    assert (await actor.append(2)).refusal is None


@pytest.mark.promise("maxmemory-learner-still-renew")
async def test_learner_and_sessions_continue(store: Store, log: LearnerLog, raw: "redis.Redis") -> None:
    actor = await new_actor(store)
    await actor.append(6)
    _fill(raw)
    log.renew()
    published = log.publish(bytes(WEIGHT_CHUNK_BYTES + 1), update=1, settled=3, scalars={"a": 1.0}, pin=True)
    assert await store.publication(published.version) == published
    log.settle(4)
    log.request_evaluation(published.version)
    log.observe("{}")
    log.commit(Commit(checkpoint_id="c", manifest_sha256="", position=6, trim=5))
    log.end_evaluation(published.version)
    assert log.residue(0).entries == 1
    assert (await store.watch(Watch(session=actor.session, probe_log_prob=(0.5,)))).news is not None
    episode = Episode(slot_id=0, episode_id=0, episode_return=1, length=1, terminated=True, version=1)
    assert await store.report(Report(session=actor.session, sequence=1, episodes=(episode,))) == (1, None)
    assert isinstance(await store.open_session("actor-1", Role.ROLLOUT), Opened)
    await store.control("checkpoint")
    await store.close_session(actor.session)
    log.release()
    assert log.acquire(RUN, "other", TTL_MS).epoch == 2


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


async def test_a_loading_redis_is_awaited(redis_binary: Binary, short_folder: Path) -> None:
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


HOUR_MS = 3_600_000
SECOND_MS = 1_000
FORTH_AND_BACK = pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS], ids=["forth", "back"])


@pytest.fixture
def clock(redis_url: str) -> Iterator[Clock]:
    """The clock of Redis's host, set by hand."""
    with redis.Redis.from_url(redis_url) as client, virtual_time():
        yield Clock(client, 10 * HOUR_MS)


def pass_time(clock: Clock, log: LearnerLog, ms: int) -> int:
    """Let time pass, a second at a time, and a learner renew; the sessions that expired."""
    expired = 0
    for _ in range(ms // SECOND_MS):
        clock.advance(SECOND_MS)
        expired += log.renew().expired_sessions
    return expired


@pytest.mark.promise("clock-redis-s-host")
@FORTH_AND_BACK
async def test_sessions_continue_and_silent_ones_end(
    store: Store, begin: Begin, clock: Clock, step_ms: int
) -> None:
    log, actor = begin(), Actor(store, "actor-0")
    timeout_ms = PACING.session_timeout_ms
    assert pass_time(clock, log, timeout_ms + SECOND_MS) == 0
    await actor.open()
    clock.advance(step_ms)
    assert log.renew().expired_sessions == 0
    assert pass_time(clock, log, timeout_ms - MOST_STEP_MS - SECOND_MS) == 0
    assert (await store.status()).sessions[0].idle_ms <= timeout_ms
    assert pass_time(clock, log, MOST_STEP_MS + 3 * SECOND_MS) == 1


@pytest.mark.promise("clock-redis-s-host")
@FORTH_AND_BACK
async def test_a_lease_lasts_its_time_when_the_clock_is_set(
    redis_url: str, clock: Clock, step_ms: int, begin: Begin
) -> None:
    _log, other = begin(), LearnerLog.connect(redis_url, wait_s=5.0)
    clock.advance(step_ms)
    waited_ms = 0
    while waited_ms <= 2 * TTL_MS:
        try:
            other.acquire(RUN, "elsewhere", TTL_MS)
            break
        except Refused:
            clock.advance(SECOND_MS)
            waited_ms += SECOND_MS
    assert TTL_MS - MOST_STEP_MS <= waited_ms <= TTL_MS + MOST_STEP_MS
    other.close()


@pytest.mark.promise("clock-redis-s-host")
@FORTH_AND_BACK
async def test_credit_is_kept_and_returned_as_without_a_clock_jump(
    store: Store, redis_url: str, clock: Clock, step_ms: int, begin: Begin
) -> None:
    log = begin(budget=CHARGE)
    working, waiting = Actor(store, "working"), Actor(store, "waiting")
    pass_time(clock, log, PACING.session_timeout_ms + SECOND_MS)
    await working.open()
    for _ in range(6):
        clock.advance(SECOND_MS)
        assert (await working.append()).refusal is None
        log.settle(log.renew().head)
        await working.watch()
    await waiting.open()
    assert working.credit.begin_through > working.acked
    clock.advance(step_ms)
    log.renew()
    with redis.Redis.from_url(redis_url) as client:
        assert client.hget(keys.STATE, "taken_back") is None
        pass_time(clock, log, 10 * SECOND_MS)
        assert client.hget(keys.STATE, "taken_back") == b"1"
    await waiting.watch()
    assert waiting.credit.begin_through == 1
