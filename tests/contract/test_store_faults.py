"""A store in trouble says so: nothing hangs, nothing is answered with somebody else's reply."""

import asyncio
import random
from dataclasses import replace

import pytest
import redis

from penstock.broker.log.connection import check_url
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.config.settings import ConfigurationError
from penstock.protocol.messages import Watch
from penstock.runtime.exit import Fatal
from tests.support.run.small_run import CHARGE
from tests.support.run.store_run import Actor, item, open_run, reconnect
from tests.support.storage.redis_server import RedisServer


async def test_a_dead_redis_is_unavailable_and_comes_back(redis_server: RedisServer, store: Store) -> None:
    log = open_run(redis_server.url)
    actor = Actor(store, "actor-0")
    await actor.open()
    redis_server.write_out()
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await actor.append()
    redis_server.start()
    await reconnect(store)
    log.reopen(log.snapshot())
    assert (await actor.append()).refusal is None
    log.close()


def test_a_learner_gives_up_on_a_dead_redis_after_its_time(redis_server: RedisServer) -> None:
    redis_server.kill()
    with pytest.raises(Fatal, match=r"did not answer for 0\.2 s"):
        LearnerLog.connect(redis_server.url, wait_s=0.2)


@pytest.mark.parametrize("password", ["wrong", None])
def test_a_password_that_redis_refuses_a_learner_is_told_as_such(
    redis_url: str, password: str | None
) -> None:
    right = "right"
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("requirepass", right)
    with pytest.raises(ConfigurationError, match=r"security\.redis_password") as caught:
        LearnerLog.connect(redis_url, wait_s=20, password=password)
    assert "wrong" not in str(caught.value)
    LearnerLog.connect(redis_url, wait_s=20, password=right).close()


def test_a_learner_waits_for_a_redis_that_comes_back(redis_server: RedisServer) -> None:
    log = open_run(redis_server.url)
    redis_server.restart()
    assert log.renew().closed
    log.close()


async def test_a_redis_that_refuses_writes_is_unavailable(store: Store, redis_url: str) -> None:
    log = open_run(redis_url)
    actor = Actor(store, "actor-0")
    await actor.open()
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("min-replicas-to-write", 1)
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
            await actor.append()
        client.config_set("min-replicas-to-write", 0)
    assert (await actor.append()).refusal is None
    log.close()


async def test_scripts_are_loaded_again_when_redis_forgot_them(store: Store, redis_url: str) -> None:
    log = open_run(redis_url)
    actor = Actor(store, "actor-0")
    await actor.open()
    with redis.Redis.from_url(redis_url) as client:
        client.script_flush()
        assert (await actor.append(2)).acked_through == 2
        client.script_flush()
        assert await actor.watch() == actor.credit
        client.script_flush()
        log.renew()
    log.close()


async def test_cancelled_calls_leave_no_reply_behind(store: Store, redis_url: str) -> None:
    log = open_run(redis_url, budget=10_000 * CHARGE, max_log_entries=100_000, max_log_bytes=2**30)
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
    log.close()


async def test_two_stores_may_send_the_same_fragment_at_once(store: Store, redis_url: str) -> None:
    log = open_run(redis_url)
    other = Store.connect(redis_url)
    actor = Actor(store, "actor-0")
    await actor.open()
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
    log.close()


@pytest.mark.parametrize("url", ["localhost:6379", "http://redis", ""])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="start the URL with one of redis://"):
        check_url(url)
