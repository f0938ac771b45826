import hashlib

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.script import MOST_FETCHED
from penstock.broker.log.store import Store
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Publication, Role, Watch
from penstock.rpc.gate import Absent
from penstock.v1 import weights_pb2 as pb
from tests.support.run import small_run
from tests.support.run.chunk_line import FetchingActor, SlowLine, fetching_actors, weight_service
from tests.support.run.store_run import BLOB, Begin


def blob(number: int, chunks: int) -> bytes:
    """Weights of so many chunks that differ from those of any other number."""
    return number.to_bytes(8, "big") * (chunks * WEIGHT_CHUNK_BYTES // 8)


class Learner:
    def __init__(self, log: LearnerLog, chunks: int) -> None:
        self.log, self.chunks, self.count = log, chunks, 0

    def publish(self) -> int:
        self.count += 1
        body = blob(self.count, self.chunks)
        return self.log.publish(body, update=self.count, settled=0, scalars={}).version

    def publish_often(self) -> None:
        for _ in range(3):
            self.publish()


@pytest.fixture
def log(begin: Begin) -> LearnerLog:
    return begin(publish=False)


def weight_keys(raw: "redis.Redis") -> set[str]:
    """Every chunk of weights in Redis, `version:index`."""
    return {key.decode().removeprefix(keys.WEIGHTS) for key in raw.scan_iter(f"{keys.WEIGHTS}*")}


def versions_held(raw: "redis.Redis") -> set[int]:
    return {int(key.partition(":")[0]) for key in weight_keys(raw)}


async def fetched(store: Store, session: int, known: int = 0) -> int:
    publication = await store.begin_fetch(session, known)
    assert publication is not None
    return publication.version


async def fetch_all(actor: FetchingActor) -> None:
    while actor.is_fetching:
        assert await actor.take_chunk()


@pytest.mark.promise("fetch-weights-begun-ends")
@pytest.mark.parametrize(("chunks", "count", "brokers"), [(2, 8, 1), (3, 5, 2)])
async def test_every_actor_gets_newer_weights_while_each_chunk_meets_a_publication(
    store: Store, log: LearnerLog, chunks: int, count: int, brokers: int
) -> None:
    learner = Learner(log, chunks)
    learner.publish()
    line = SlowLine(await fetching_actors(store, count, brokers=brokers))
    for _ in range(3 * chunks * count):
        await line.carry()
        learner.publish()
    assert max(line.longest_waits()) <= 1.5 * chunks * count
    assert sum(actor.given_up for actor in line.actors) == 0


@pytest.mark.promise("weights-newest-two-versions")
async def test_a_limited_number_of_versions_is_kept_for_fetches(
    store: Store, log: LearnerLog, raw: "redis.Redis"
) -> None:
    learner = Learner(log, 2)
    actors = await fetching_actors(store, 24)
    for actor in actors:
        learner.publish()
        assert await actor.take_chunk()
    wanted = {actor.wanted.version for actor in actors}
    assert wanted == {*range(1, MOST_FETCHED + 1)}
    assert versions_held(raw) == wanted | {learner.count, learner.count - 1}
    for actor in actors:
        await fetch_all(actor)
        assert actor.given_up == 0
        assert actor.blob == blob(actor.version, 2)
    learner.publish()
    assert versions_held(raw) == {learner.count, learner.count - 1}


@pytest.mark.promise("actors-slow-lines-keep")
async def test_actors_on_slow_lines_do_not_keep_the_others_from_newer_weights(
    store: Store, log: LearnerLog, raw: "redis.Redis"
) -> None:
    learner = Learner(log, 2)
    fast, *slow = await fetching_actors(store, 5)
    arrived = dict.fromkeys((actor.session for actor in slow), 0)
    for turn in range(20):
        for actor in (slow[turn % 4], fast, fast):
            learner.publish_often()
            before, actor.service = actor.version, weight_service(store)
            assert await actor.take_chunk()
            if actor is not fast:
                arrived[actor.session] += actor.version > before
        assert fast.version > before
        assert len(versions_held(raw)) <= MOST_FETCHED + 2
    assert sum(actor.given_up for actor in (fast, *slow)) == 0
    assert min(arrived.values()) >= 2


@pytest.mark.promise("actors-slow-lines-keep")
async def test_a_session_that_has_all_versions_being_fetched_gets_a_newer_one(
    store: Store, log: LearnerLog
) -> None:
    learner = Learner(log, 2)
    sessions = [actor.session for actor in await fetching_actors(store, MOST_FETCHED + 1)]
    for session in sessions[:MOST_FETCHED]:
        learner.publish()
        assert await fetched(store, session) == learner.count
    learner.publish()
    newest_fetched = learner.count - 1
    assert await fetched(store, sessions[-1]) == newest_fetched
    assert await fetched(store, sessions[-1], known=newest_fetched) == learner.count
    assert await fetched(store, sessions[0]) == 1
    assert await fetched(store, sessions[1], known=1) == 3
    assert await fetched(store, sessions[1], known=1) == 3


@pytest.mark.promise("fetch-weights-begun-ends")
async def test_a_fetch_continues_at_another_broker(store: Store, log: LearnerLog) -> None:
    learner = Learner(log, 3)
    learner.publish()
    (actor,) = await fetching_actors(store, 1)
    assert await actor.take_chunk()
    learner.publish_often()
    actor.service = weight_service(store)
    await fetch_all(actor)
    assert (actor.version, actor.given_up) == (1, 0)
    assert actor.blob == blob(1, 3)


@pytest.mark.promise("credit-asks-version-session")
async def test_credit_never_asks_for_a_version_that_the_session_cannot_have(
    store: Store, begin: Begin
) -> None:
    log = begin(publish=False, budget=small_run.CHARGE)
    learner = Learner(log, 2)
    learner.publish()
    other, actor = await fetching_actors(store, 2)
    assert await actor.take_chunk()
    learner.publish_often()
    await store.close_session(other.session)
    await actor.look()
    assert actor.min_version == actor.wanted.version == 1
    await fetch_all(actor)
    assert actor.given_up == 0


@pytest.mark.promise("fetch-weights-begun-ends")
async def test_a_fetch_renews_the_session(store: Store, log: LearnerLog, raw: "redis.Redis") -> None:
    learner = Learner(log, 3)
    learner.publish()
    (actor,) = await fetching_actors(store, 1)
    await actor.look()
    long_ago = 1.0
    while actor.is_fetching:
        raw.zadd(keys.OPEN, {str(actor.session): long_ago})
        assert await actor.take_chunk()
        heard = raw.zscore(keys.OPEN, str(actor.session))
        assert heard is not None
        assert heard > long_ago


async def test_a_session_that_ends_releases_the_version_that_it_fetched(
    store: Store, log: LearnerLog, raw: "redis.Redis"
) -> None:
    learner = Learner(log, 2)
    learner.publish()
    (actor,) = await fetching_actors(store, 1)
    assert await actor.take_chunk()
    for _ in range(2):
        learner.publish()
    assert actor.wanted.version in versions_held(raw)
    await store.close_session(actor.session)
    learner.publish()
    assert versions_held(raw) == {learner.count, learner.count - 1}


@pytest.mark.promise("fetch-weights-begun-ends")
async def test_chunks_come_from_the_brokers_cache_when_redis_has_dropped_them(
    store: Store, log: LearnerLog, raw: "redis.Redis"
) -> None:
    learner = Learner(log, 2)
    learner.publish()
    (actor,) = await fetching_actors(store, 1)
    assert await actor.take_chunk()
    first = actor.blob
    assert await actor.take_chunk()
    wanted, actor.blob, actor.version = actor.wanted.version, first, 0
    learner.publish_often()
    assert wanted not in versions_held(raw)
    assert await actor.take_chunk()
    assert (actor.version, actor.given_up) == (wanted, 0)
    assert actor.blob == blob(1, 2)
    with pytest.raises(Absent):
        await actor.service.GetWeights(pb.GetWeightsRequest(session=actor.session, version=wanted), None)


LARGE = b"x" * (WEIGHT_CHUNK_BYTES + 7)


def publish(log: LearnerLog, count: int, blob: bytes = BLOB) -> list[int]:
    return [log.publish(blob, update=index, settled=0, scalars={}).version for index in range(count)]


async def held(store: Store, version: int) -> bytes | None:
    """The bytes that a broker finds under a version; None where it has no publication of it."""
    publication = await store.publication(version)
    if publication is None:
        return None
    count = -(-publication.size // WEIGHT_CHUNK_BYTES)
    found = b"".join([await store.weights_chunk(version, index) or b"" for index in range(count)])
    assert hashlib.sha256(found).hexdigest() == publication.sha256
    return found


@pytest.mark.promise("weights-registered-version-available", "registered-version-answers-until")
async def test_a_kept_version_stays_until_released(store: Store, begin: Begin, raw: "redis.Redis") -> None:
    log = begin()
    first, second = publish(log, 2)
    assert log.kept.keep({first}, highest=second, traffic_revision=0) == ()
    publish(log, 3)
    assert await held(store, first) == BLOB
    assert await held(store, second) is None
    assert log.kept.keep((), highest=second, traffic_revision=0) == ()
    assert await held(store, first) is None
    assert len(weight_keys(raw)) == 2


async def test_the_end_of_an_evaluation_does_not_release_kept_versions(store: Store, begin: Begin) -> None:
    log = begin()
    version = log.publish(BLOB, update=1, settled=0, scalars={}, pin=True).version
    log.kept.keep({version}, highest=version, traffic_revision=0)
    publish(log, 2)
    log.end_evaluation(version)
    assert await held(store, version) == BLOB


async def test_bytes_that_redis_evicted_are_restored_and_the_pointer_stays(
    store: Store, begin: Begin
) -> None:
    log = begin()
    (old,) = publish(log, 1, LARGE)
    newest = publish(log, 3)[-1]
    assert await held(store, old) is None
    assert log.kept.keep({old}, highest=newest, traffic_revision=0) == (old,)
    log.kept.restore(Publication(old, 0, hashlib.sha256(LARGE).hexdigest(), len(LARGE)), LARGE)
    assert await held(store, old) == LARGE
    assert (await store.status()).latest.version == newest
    assert log.kept.keep({old}, highest=newest, traffic_revision=0) == ()
    publish(log, 3)
    assert await held(store, old) == LARGE


async def test_half_restored_bytes_are_deleted_with_the_version(
    store: Store, begin: Begin, raw: "redis.Redis"
) -> None:
    log = begin()
    (old,) = publish(log, 1, LARGE)
    publish(log, 3)
    log.kept.keep({old}, highest=old, traffic_revision=0)
    log._calls.fenced("stage_version", old, 2)
    log._calls.fenced("store_chunk", old, 0, LARGE[:WEIGHT_CHUNK_BYTES])
    publish(log, 2)
    assert f"{old}:0" in weight_keys(raw)
    log.kept.keep((), highest=old, traffic_revision=0)
    assert len(weight_keys(raw)) == 2


async def test_a_version_that_is_not_kept_is_not_restored(
    store: Store, begin: Begin, raw: "redis.Redis"
) -> None:
    log = begin()
    (old,) = publish(log, 1)
    publish(log, 3)
    before = weight_keys(raw)
    log.kept.restore(Publication(old, 0, hashlib.sha256(BLOB).hexdigest(), len(BLOB)), BLOB)
    assert await held(store, old) is None
    assert weight_keys(raw) == before


async def test_the_next_learner_finds_the_kept_versions(store: Store, begin: Begin) -> None:
    log = begin()
    first = publish(log, 1)[0]
    log.kept.keep({first}, highest=first, traffic_revision=0)
    log.release()
    publish(begin(publish=False), 3)
    assert await held(store, first) == BLOB


def test_a_registered_number_is_never_drawn_again(begin: Begin) -> None:
    log = begin()
    log.kept.keep((), highest=1000, traffic_revision=0)
    assert publish(log, 1) == [1001]
    assert log.snapshot().version == 1001
    log.kept.keep((), highest=5, traffic_revision=0)
    assert publish(log, 1) == [1002]


async def test_a_watch_learns_the_revision_of_the_traffic(store: Store, begin: Begin) -> None:
    begin().kept.keep((), highest=0, traffic_revision=7)
    opened = await store.open_session("actor-0", Role.ROLLOUT)
    watched = await store.watch(Watch(session=opened.session))  # type: ignore[union-attr]  # it is open
    assert watched.news is not None
    assert watched.news.traffic_revision == 7
