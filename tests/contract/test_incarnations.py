"""A Redis that lost a part of its run holds another incarnation of it; keys of another layout are refused."""

from collections.abc import AsyncIterator

import grpc
import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Opened
from penstock.broker.log.script import FIRST_LAYOUT, LAYOUT
from penstock.broker.log.store import OtherRelease, Store, StoreUnavailable
from penstock.broker.service.experience_service import Admission
from penstock.broker.service.sessions import LastCredit, SessionOwners
from penstock.protocol.append import SentFragment
from penstock.protocol.messages import Role
from penstock.rpc.identity import CALLER, SCHEME, parse
from penstock.runtime.exit import Fatal
from tests.support.experience.fragment_messages import sent
from tests.support.run.small_run import RUN, fragment, specification
from tests.support.run.store_run import PACING, TTL_MS, Actor, item, open_run

Dump = dict[bytes, bytes]


def snapshot(raw: "redis.Redis") -> Dump:
    """Every key and its content, serialised."""
    names = [bytes(name) for name in raw.scan_iter()]
    return {name: bytes(raw.dump(name) or b"") for name in names}


def fill(raw: "redis.Redis", held: Dump) -> None:
    """Empty the server and put a snapshot in, as a restore from a copy does; the server runs on."""
    raw.flushall()
    for name, value in held.items():
        raw.restore(name, 0, value)


def begin_anew(url: str, unroll_length: int) -> LearnerLog:
    """Another run of the same name, whose fragments may be longer."""
    log = LearnerLog.connect(url, wait_s=5.0)
    log.acquire(RUN, "learner", TTL_MS)
    log.start(specification(unroll_length=unroll_length).encode(), PACING)
    return log


def message(session: int) -> list[SentFragment]:
    """One good fragment, as it arrives."""
    return [sent(fragment(session))]


class Context:
    """Of a call that may be refused."""

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        """End the call."""
        raise PermissionError(code, text)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    """A broker's store, beside which something is remembered."""
    made = Store.connect(redis_url)
    made.on_incarnation(LastCredit().forget)
    yield made
    await made.aclose()


@pytest.mark.promise("broker-remembers-run-ends")
async def test_a_broker_forgets_the_specification_of_the_run_before(
    store: Store, redis_url: str, raw: "redis.Redis"
) -> None:
    first = begin_anew(redis_url, unroll_length=3)
    admission, last_credit = Admission(store.specification, store.confirm, lambda: 0.0), LastCredit()
    store.on_incarnation(admission.forget)
    store.on_incarnation(last_credit.forget)
    before = await Actor(store, "actor-0").open()
    last_credit.note(before.session, 77)
    assert (await admission.admit(before.session, message(before.session))).refusal is not None
    raw.flushall()
    second, elsewhere = begin_anew(redis_url, unroll_length=4), Store.connect(redis_url)
    after = await Actor(elsewhere, "actor-0").open()
    assert after.session == before.session
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        await admission.admit(after.session, message(after.session))
    assert (await admission.admit(after.session, message(after.session))).refusal is None
    assert last_credit[after.session] == 0
    first.close()
    second.close()
    await elsewhere.aclose()


@pytest.mark.promise("broker-remembers-run-ends")
async def test_a_broker_forgets_who_opened_the_sessions_of_the_run_before(
    store: Store, redis_url: str, raw: "redis.Redis"
) -> None:
    first = begin_anew(redis_url, unroll_length=4)
    owners = SessionOwners(store.owner_of, store.confirm)
    store.on_incarnation(owners.forget)
    one, other = parse(f"{SCHEME}{RUN}/actor/one"), parse(f"{SCHEME}{RUN}/actor/other")
    before = await opened_by(store, str(one))
    CALLER.set(one)
    await owners.check(before, Context())
    raw.flushall()
    second, elsewhere = begin_anew(redis_url, unroll_length=4), Store.connect(redis_url)
    assert await opened_by(elsewhere, str(other)) == before
    CALLER.set(other)
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        await owners.check(before, Context())
    await owners.check(before, Context())
    first.close()
    second.close()
    await elsewhere.aclose()


async def opened_by(store: Store, owner: str) -> int:
    """A session of this identity."""
    opened = await store.open_session("actor-0", Role.ROLLOUT, owner)
    assert isinstance(opened, Opened)
    return opened.session


@pytest.mark.promise("broker-remembers-run-ends")
async def test_what_was_checked_for_another_incarnation_is_not_appended(
    store: Store, redis_url: str, raw: "redis.Redis"
) -> None:
    first = open_run(redis_url)
    old = Actor(store, "actor-0")
    await old.open()
    raw.flushall()
    second, elsewhere = open_run(redis_url), Store.connect(redis_url)
    new = Actor(elsewhere, "actor-1")
    await new.open()
    assert new.session == old.session
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        await old.append()
    assert second.read(0, 1, 0) == []
    assert (await new.append()).acked_through == 1
    first.close()
    second.close()
    await elsewhere.aclose()


@pytest.mark.promise("redis-filled-older-snapshot")
async def test_a_redis_filled_from_an_older_snapshot_is_another_incarnation(
    store: Store, redis_url: str, raw: "redis.Redis"
) -> None:
    log, actor = open_run(redis_url, budget=1000), Actor(store, "actor-0")
    await actor.open()
    await actor.append(2)
    log.read(0, 10, 0)
    held, incarnation = snapshot(raw), raw.hget(keys.STATE, "incarnation")
    await actor.append(2)
    log.read(2, 10, 0)
    fill(raw, held)
    assert log.renew().closed
    log.reopen(log.snapshot())
    assert not log.renew().closed
    assert raw.hget(keys.STATE, "incarnation") != incarnation
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        await store.status()
    assert (await store.status()).log_head >= 4
    log.close()


@pytest.mark.promise("redis-filled-older-snapshot")
async def test_a_redis_filled_from_a_snapshot_of_an_earlier_lease_is_opened_again(
    redis_url: str, raw: "redis.Redis"
) -> None:
    open_run(redis_url).close()
    held = snapshot(raw)
    log = open_run(redis_url)
    fill(raw, held)
    assert log.renew().closed
    log.reopen(log.snapshot())
    assert not log.renew().closed
    log.close()


@pytest.mark.promise("brokers-learners-meet-run")
async def test_another_layout_is_refused_by_broker_and_learner(
    store: Store, redis_url: str, raw: "redis.Redis"
) -> None:
    log = open_run(redis_url)
    actor = Actor(store, "actor-0")
    await actor.open()
    raw.hset(keys.STATE, "layout", LAYOUT + 1)
    held = snapshot(raw)
    told = f"has layout {LAYOUT + 1}, this release has layout {LAYOUT}"
    with pytest.raises(OtherRelease, match=told):
        await store.append(actor.session, 0, [item(actor.session, 1)])
    with pytest.raises(Fatal, match=told):
        log.renew()
    with pytest.raises(Fatal, match=told):
        LearnerLog.connect(redis_url, wait_s=5.0).acquire(RUN, "learner", TTL_MS)
    assert {name: raw.dump(name) for name in held if not name.startswith(keys.STAGING.encode())} == held
    log.close()


@pytest.mark.promise("brokers-learners-meet-run")
async def test_a_run_of_before_layouts_is_taken_over_by_a_learner(
    store: Store, redis_url: str, raw: "redis.Redis"
) -> None:
    open_run(redis_url).close()
    raw.hdel(keys.STATE, "layout", "incarnation")
    with pytest.raises(StoreUnavailable, match=f"has layout {FIRST_LAYOUT}") as told:
        await store.status()
    assert not isinstance(told.value, OtherRelease)
    log = open_run(redis_url)
    assert raw.hget(keys.STATE, "layout") == str(LAYOUT).encode()
    actor = Actor(store, "actor-0")
    await actor.open()
    assert (await actor.append()).refusal is None
    log.close()
