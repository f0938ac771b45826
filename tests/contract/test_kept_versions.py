"""Versions that the registry keeps stay in Redis, come back to it, and go when they are retired."""

import hashlib

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Status
from penstock.broker.log.store import Store
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Publication, Role, Watch
from tests.support.run.small_run import RUN, specification
from tests.support.run.store_run import BLOB, PACING, TTL_MS, open_run

LARGE = b"x" * (WEIGHT_CHUNK_BYTES + 7)


def publish(log: LearnerLog, count: int, blob: bytes = BLOB) -> list[int]:
    """The numbers of so many publications."""
    return [log.publish(blob, update=index, settled=0, scalars={}).version for index in range(count)]


async def held(url: str, version: int) -> bytes | None:
    """The bytes that a broker finds under a version; None where it has no publication of it."""
    store = Store.connect(url)
    publication = await store.publication(version)
    if publication is None:
        await store.aclose()
        return None
    chunks = [
        await store.weights_chunk(version, index)
        for index in range(-(-publication.size // WEIGHT_CHUNK_BYTES))
    ]
    await store.aclose()
    blob = b"".join(chunk or b"" for chunk in chunks)
    assert hashlib.sha256(blob).hexdigest() == publication.sha256
    return blob


def weight_keys(url: str) -> set[str]:
    """Every chunk of weights in Redis, `version:index`."""
    with redis.Redis.from_url(url) as client:
        return {
            bytes(key).decode().removeprefix(keys.WEIGHTS) for key in client.scan_iter(f"{keys.WEIGHTS}*")
        }


async def status(url: str) -> Status:
    """The run at one moment."""
    store = Store.connect(url)
    found = await store.status()
    await store.aclose()
    return found


@pytest.mark.promise("weights-registered-version-available", "registered-version-answers-until")
async def test_a_kept_version_stays_until_it_is_kept_no_longer(redis_url: str) -> None:
    log = open_run(redis_url)
    first, second = publish(log, 2)
    assert log.kept.keep({first}, highest=second, traffic_revision=0) == ()
    publish(log, 3)
    assert await held(redis_url, first) == BLOB
    assert await held(redis_url, second) is None
    assert log.kept.keep((), highest=second, traffic_revision=0) == ()
    assert await held(redis_url, first) is None
    assert len(weight_keys(redis_url)) == 2
    log.close()


async def test_the_end_of_an_evaluation_does_not_let_go_of_what_is_kept(redis_url: str) -> None:
    log = open_run(redis_url)
    version = log.publish(BLOB, update=1, settled=0, scalars={}, pin=True).version
    log.kept.keep({version}, highest=version, traffic_revision=0)
    publish(log, 2)
    log.end_evaluation(version)
    assert await held(redis_url, version) == BLOB
    log.close()


async def test_bytes_that_redis_let_go_come_back_and_the_pointer_stays(redis_url: str) -> None:
    log = open_run(redis_url)
    (old,) = publish(log, 1, LARGE)
    newest = publish(log, 3)[-1]
    assert await held(redis_url, old) is None
    assert log.kept.keep({old}, highest=newest, traffic_revision=0) == (old,)
    log.kept.restore(Publication(old, 0, hashlib.sha256(LARGE).hexdigest(), len(LARGE)), LARGE)
    assert await held(redis_url, old) == LARGE
    assert (await status(redis_url)).latest.version == newest
    assert log.kept.keep({old}, highest=newest, traffic_revision=0) == ()
    publish(log, 3)
    assert await held(redis_url, old) == LARGE
    log.close()


async def test_bytes_half_put_back_go_with_the_version(redis_url: str) -> None:
    log = open_run(redis_url)
    (old,) = publish(log, 1, LARGE)
    publish(log, 3)
    log.kept.keep({old}, highest=old, traffic_revision=0)
    log._calls.fenced("stage_version", old, 2)
    log._calls.fenced("store_chunk", old, 0, LARGE[:WEIGHT_CHUNK_BYTES])
    publish(log, 2)
    assert f"{old}:0" in weight_keys(redis_url)
    log.kept.keep((), highest=old, traffic_revision=0)
    assert len(weight_keys(redis_url)) == 2
    log.close()


async def test_what_is_not_kept_is_not_put_back(redis_url: str) -> None:
    log = open_run(redis_url)
    (old,) = publish(log, 1)
    publish(log, 3)
    before = weight_keys(redis_url)
    log.kept.restore(Publication(old, 0, hashlib.sha256(BLOB).hexdigest(), len(BLOB)), BLOB)
    assert await held(redis_url, old) is None
    assert weight_keys(redis_url) == before
    log.close()


async def test_the_next_learner_finds_what_is_kept(redis_url: str) -> None:
    log = open_run(redis_url)
    first = publish(log, 1)[0]
    log.kept.keep({first}, highest=first, traffic_revision=0)
    log.release()
    log.close()
    successor = LearnerLog.connect(redis_url, wait_s=5)
    successor.acquire(RUN, "learner", TTL_MS)
    successor.start(specification().encode(), PACING, position=0)
    publish(successor, 3)
    assert await held(redis_url, first) == BLOB
    successor.close()


def test_a_registered_number_is_never_drawn_again(redis_url: str) -> None:
    log = open_run(redis_url)
    log.kept.keep((), highest=1000, traffic_revision=0)
    assert publish(log, 1) == [1001]
    assert log.snapshot().version == 1001
    log.kept.keep((), highest=5, traffic_revision=0)
    assert publish(log, 1) == [1002]
    log.close()


async def test_a_watch_learns_the_revision_of_the_traffic(redis_url: str) -> None:
    log = open_run(redis_url)
    log.kept.keep((), highest=0, traffic_revision=7)
    store = Store.connect(redis_url)
    opened = await store.open_session("actor-0", Role.ROLLOUT)
    watched = await store.watch(Watch(session=opened.session))  # type: ignore[union-attr]  # it is open
    assert watched.news is not None
    assert watched.news.traffic_revision == 7
    await store.aclose()
    log.close()
