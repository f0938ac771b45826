"""At `maxmemory` nothing is evicted, experience waits, and all that frees memory goes on."""

from collections.abc import Iterator

import pytest
import redis

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Commit, Opened
from penstock.broker.log.store import Store
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Episode, Report, Role, Watch
from penstock.protocol.refusal import Reason
from tests.support.run.small_run import CHARGE, RUN
from tests.support.run.store_run import TTL_MS, Actor, open_run


@pytest.fixture
def log(redis_url: str) -> Iterator[LearnerLog]:
    """A learner that opened the run and published version 1."""
    made = open_run(redis_url, budget=16 * CHARGE)
    yield made
    made.close()


@pytest.fixture
def full(redis_url: str, log: LearnerLog) -> Iterator["redis.Redis"]:
    """Call `full.config_set` to let memory run out; a plain write is then refused."""
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


def _fill(client: "redis.Redis") -> None:
    client.config_set("maxmemory", 1024)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("other", b"x")


@pytest.mark.promise("maxmemory-learner-still-renew")
async def test_append_waits_and_stores_nothing(store: Store, log: LearnerLog, full: "redis.Redis") -> None:
    actor = Actor(store, "actor-0")
    await actor.open()
    await actor.append()
    _fill(full)
    reply = await actor.append(2)
    assert reply.refusal is not None
    assert (reply.refusal.reason, reply.acked_through) == (Reason.FULL, 1)
    assert reply.refusal.detail.startswith("staging")
    assert log.acked() == log.residue(0).entries == 1
    full.config_set("maxmemory", 0)
    assert (await actor.append(2)).refusal is None


@pytest.mark.promise("maxmemory-learner-still-renew")
async def test_learner_and_sessions_go_on(store: Store, log: LearnerLog, full: "redis.Redis") -> None:
    actor = Actor(store, "actor-0")
    await actor.open()
    await actor.append(6)
    _fill(full)
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
