import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Answer, CommandRefusal, Commit, Opened, Totals
from penstock.broker.log.script import FIRST_LAYOUT, KEPT_COMMANDS, LAYOUT, MAX_PENDING_COMMANDS
from penstock.broker.log.store import OtherRelease, Store, StoreUnavailable
from penstock.broker.service.experience_service import Admission
from penstock.broker.service.sessions import LastCredit, SessionOwners
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason, Refused
from penstock.rpc.identity import CALLER, SCHEME, parse
from penstock.runtime.exit import Fatal
from penstock.v1 import control_pb2 as pb
from tests.support.experience.fragment_messages import sent
from tests.support.network.proxy import Proxy
from tests.support.run.harness import eventually
from tests.support.run.small_run import CHARGE, RUN, fragment
from tests.support.run.store_run import (
    BLOB,
    TTL_MS,
    Actor,
    Begin,
    item,
    new_actor,
    open_run,
    reconnect,
)
from tests.support.storage.redis_server import RedisServer

COMMIT = Commit(
    checkpoint_id="000000000001-00000009", manifest_sha256="0" * 64, position=2, trim=2, totals=Totals()
)
WRITES: dict[str, tuple[Any, ...]] = {
    "renew": (TTL_MS, 0),
    "allocate_version": (1,),
    "store_chunk": (3, 0, BLOB),
    "publish": (3, 9, "0" * 64, len(BLOB), 1, 2, "{}", "", 0, BLOB),
    "settle": (2,),
    "commit": (COMMIT.encode(), COMMIT.position, COMMIT.trim),
    "answer": (1, Answer(number=1, request_id="id-1", detail="done", checkpoint_id="c1").encode()),
    "trim": (512,),
    "observe": ("{}",),
    "request_evaluation": (1,),
    "end_evaluation": (1,),
    "keep_versions": (5, 9, 1),
    "stage_version": (7, 1),
    "restore_version": (3, 9, "0" * 64, len(BLOB), 1),
}


@pytest.fixture
def old(begin: Begin) -> LearnerLog:
    """A learner whose lease went to the next process of the same name; two versions are published since."""
    log = begin()
    begin(publish=False).publish(BLOB, update=1, settled=0, scalars={})
    return log


@pytest.mark.parametrize("name", [*WRITES, "open_log"])
async def test_a_write_under_an_old_epoch_changes_nothing(
    redis_url: str, raw: "redis.Redis", old: LearnerLog, name: str
) -> None:
    store = Store.connect(redis_url)
    actor = await new_actor(store)
    assert (await actor.append(4)).refusal is None
    await store.command("restore", "good", "id-1")
    await store.aclose()
    # What the scripts of a publication and of a trim would find half-done.
    raw.hset(keys.STAGED_WEIGHTS, "3", "1")
    raw.sadd(keys.KEPT, "7")
    raw.hset(keys.STATE, "trim_floor", 1)
    before = snapshot(raw)
    write = partial(old._calls.fenced, name, *WRITES.get(name, ()))
    if name == "open_log":
        write = partial(old.reopen, old.snapshot())
    with pytest.raises(Refused) as caught:
        write()
    assert caught.value.refusal.reason is Reason.FENCED
    assert snapshot(raw) == before


def test_release_by_an_old_learner_frees_no_lease(raw: "redis.Redis", old: LearnerLog) -> None:
    before = snapshot(raw)
    old.release()
    assert snapshot(raw) == before


async def test_a_call_whose_reply_is_lost_is_not_repeated_by_the_client(redis_url: str, begin: Begin) -> None:
    begin(budget=64 * CHARGE)
    with Proxy(redis_url.replace("unix://", "unix:"), http2=False) as proxy:
        url = proxy.address.replace("unix:", "unix://")
        store = Store.connect(url)
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "evalsha": lambda: store.append(1, 0, []),
            "get": lambda: store.weights_chunk(0, 0),
        }
        for command, ask in asked.items():
            await ask()  # its connection is open
            before = calls(redis_url)
            with losing_one_reply(proxy), pytest.raises(StoreUnavailable):
                await ask()
            assert added(before, calls(redis_url), command, "eval") == [1, 0]
        await store.aclose()
        learner = LearnerLog.connect(url, wait_s=0)
        before = calls(redis_url)
        with losing_one_reply(proxy), pytest.raises(redis.ConnectionError):
            learner._calls.client.execute_command("STRLEN", keys.SPECIFICATION)
        assert added(before, calls(redis_url), "strlen", "eval") == [1, 0]
        learner.close()


@contextmanager
def losing_one_reply(proxy: Proxy) -> Iterator[None]:
    """The next reply is lost with its connection.

    The network is good again before anybody can call once more.
    """
    lost = proxy.lost_replies

    def heal() -> None:
        eventually(lambda: proxy.lost_replies > lost, "the loss of a reply")
        proxy.heal()

    proxy.set(lose_replies=1.0)
    healing = threading.Thread(target=heal)
    healing.start()
    yield
    healing.join()


def added(before: dict[str, int], after: dict[str, int], *names: str) -> list[int]:
    return [after.get(name, 0) - before.get(name, 0) for name in names]


def calls(url: str) -> dict[str, int]:
    """How often the server ran each command, for clients and scripts together."""
    with redis.Redis.from_url(url) as client:
        stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(of["calls"]) for name, of in stats.items()}


def done(number: int, request_id: str) -> Answer:
    return Answer(number=number, request_id=request_id, detail="done", checkpoint_id=f"c{number}")


def commit(*answers: Answer, number: int = 1) -> Commit:
    return Commit(checkpoint_id=f"c{number}", manifest_sha256="0" * 64, position=0, trim=0, answers=answers)


@pytest.mark.promise("command-operator-done-once")
async def test_a_request_id_is_one_command(store: Store, log: LearnerLog) -> None:
    before = log.renew().revision
    first, is_new = await store.command("restore", "good", "id-1", "why")
    again, is_new_again = await store.command("restore", "good", "id-1")
    assert (first, is_new, is_new_again) == (again, True, False)
    assert (first.number, first.answer, first.argument) == (1, None, "good")
    assert log.renew().revision == before + 1
    with pytest.raises(Refused, match=r"invalid.*restore good"):
        await store.command("restore", "other", "id-1")
    second, _ = await store.command("flush", "8", "id-2")
    assert second.number == 2
    assert log.commands() == [first, second]
    assert log.snapshot().command == 2


@pytest.mark.promise("command-operator-done-once")
async def test_a_commit_returns_what_it_contains(store: Store, log: LearnerLog) -> None:
    command, _ = await store.command("restore", "good", "id-1")
    answer = done(command.number, "id-1")
    log.commit(commit(answer))
    log.commit(commit(answer))
    assert (await store.command("restore", "good", "id-1"))[0].answer == answer
    assert log.snapshot().commits == (commit(answer),)
    assert Commit.decode(commit(answer).encode()) == commit(answer)


async def test_a_refusal_is_answered_at_once(store: Store, log: LearnerLog) -> None:
    command, _ = await store.command("restore", "nothing", "id-1")
    refused = Answer(number=1, request_id="id-1", detail="no such name", refusal=CommandRefusal.NAME)
    log.answer(refused)
    assert (await store.command("restore", "nothing", "id-1"))[0].answer == refused
    assert command.number == 1


async def test_waiting_and_kept_commands_are_limited(store: Store, log: LearnerLog) -> None:
    for number in range(1, MAX_PENDING_COMMANDS + 1):
        await store.command("checkpoint", "", f"id-{number}")
    with pytest.raises(Refused, match="full: commands"):
        await store.command("checkpoint", "", "one-more")
    for number in range(1, MAX_PENDING_COMMANDS + 1):
        log.answer(done(number, f"id-{number}"))
    for number in range(MAX_PENDING_COMMANDS + 1, KEPT_COMMANDS + 2):
        command, _ = await store.command("checkpoint", "", f"id-{number}")
        log.answer(done(command.number, f"id-{number}"))
    assert [command.number for command in log.commands()] == [*range(2, KEPT_COMMANDS + 2)]
    again, is_new = await store.command("checkpoint", "", "id-1")
    assert (again.number, is_new) == (KEPT_COMMANDS + 2, True)


async def test_a_redis_set_back_gives_no_number_twice(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    for number in (1, 2):
        await store.command("checkpoint", "", f"id-{number}")
    log.commands()
    redis_server.restart_empty()
    await reconnect(store)
    log.renew()
    log.reopen(log.snapshot())
    assert log.commands() == []
    command, is_new = await store.command("checkpoint", "", "id-2")
    assert (command.number, is_new) == (3, True)
    log.commit(commit(done(2, "id-2")))
    assert log.commands()[0].answer is None, "a command that Redis lost is not made up by its answer"


def test_refusals_have_the_numbers_of_the_protocol() -> None:
    names = {name.removeprefix("COMMAND_REFUSAL_"): number for name, number in pb.CommandRefusal.items()}
    assert {one.name: one.value for one in CommandRefusal} == {k: v for k, v in names.items() if v}


def snapshot(raw: "redis.Redis") -> dict[bytes, bytes]:
    names = [bytes(name) for name in raw.scan_iter()]
    return {name: bytes(raw.dump(name) or b"") for name in names}


def fill(raw: "redis.Redis", held: dict[bytes, bytes]) -> None:
    """Empty the server and put a snapshot in, as a restore from a copy does; the server runs on."""
    raw.flushall()
    for name, value in held.items():
        raw.restore(name, 0, value)


class Context:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise PermissionError(code, text)


@pytest.fixture
async def incarnations_store(redis_url: str) -> AsyncIterator[Store]:
    made = Store.connect(redis_url)
    made.on_incarnation(LastCredit().forget)
    yield made
    await made.aclose()


@pytest.fixture
async def elsewhere(redis_url: str) -> AsyncIterator[Store]:
    """The store of another broker."""
    made = Store.connect(redis_url)
    yield made
    await made.aclose()


@pytest.mark.promise("broker-remembers-run-ends")
async def test_a_broker_forgets_the_specification_of_the_run_before(
    incarnations_store: Store, elsewhere: Store, begin: Begin, raw: "redis.Redis"
) -> None:
    begin(unroll=3, publish=False)
    store, last_credit = incarnations_store, LastCredit()
    admission = Admission(store.specification, store.confirm, lambda: 0.0)
    store.on_incarnation(admission.forget)
    store.on_incarnation(last_credit.forget)
    before = await new_actor(store)
    message = [sent(fragment(before.session))]
    last_credit.note(before.session, 77)
    assert (await admission.admit(before.session, message)).refusal is not None
    raw.flushall()
    begin(unroll=4, publish=False)
    after = await new_actor(elsewhere)
    assert after.session == before.session
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        await admission.admit(after.session, message)
    assert (await admission.admit(after.session, message)).refusal is None
    assert last_credit[after.session] == 0


@pytest.mark.promise("broker-remembers-run-ends")
async def test_a_broker_forgets_who_opened_the_sessions_of_the_run_before(
    incarnations_store: Store, elsewhere: Store, begin: Begin, raw: "redis.Redis"
) -> None:
    begin()
    owners = SessionOwners(incarnations_store.owner_of, incarnations_store.confirm)
    incarnations_store.on_incarnation(owners.forget)
    one, other = parse(f"{SCHEME}{RUN}/actor/one"), parse(f"{SCHEME}{RUN}/actor/other")
    before = await opened_by(incarnations_store, str(one))
    CALLER.set(one)
    await owners.check(before, Context())
    raw.flushall()
    begin()
    assert await opened_by(elsewhere, str(other)) == before
    CALLER.set(other)
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        await owners.check(before, Context())
    await owners.check(before, Context())


async def opened_by(incarnations_store: Store, owner: str) -> int:
    opened = await incarnations_store.open_session("actor-0", Role.ROLLOUT, owner)
    assert isinstance(opened, Opened)
    return opened.session


@pytest.mark.promise("broker-remembers-run-ends")
async def test_fragments_checked_for_another_incarnation_are_not_appended(
    incarnations_store: Store, elsewhere: Store, begin: Begin, raw: "redis.Redis"
) -> None:
    begin()
    old = await new_actor(incarnations_store)
    raw.flushall()
    second = begin()
    new = await new_actor(elsewhere, "actor-1")
    assert new.session == old.session
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        await old.append()
    assert second.read(0, 1, 0) == []
    assert (await new.append()).acked_through == 1


@pytest.mark.promise("redis-filled-older-snapshot")
async def test_a_redis_filled_from_an_older_snapshot_is_another_incarnation(
    incarnations_store: Store, begin: Begin, raw: "redis.Redis"
) -> None:
    log, actor = begin(budget=1000), Actor(incarnations_store, "actor-0")
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
        await incarnations_store.status()
    assert (await incarnations_store.status()).log_head >= 4


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
    incarnations_store: Store, redis_url: str, raw: "redis.Redis", begin: Begin
) -> None:
    log = begin()
    actor = await new_actor(incarnations_store)
    raw.hset(keys.STATE, "layout", LAYOUT + 1)
    held = snapshot(raw)
    told = f"has layout {LAYOUT + 1}, this release has layout {LAYOUT}"
    with pytest.raises(OtherRelease, match=told):
        await incarnations_store.append(actor.session, 0, [item(actor.session, 1)])
    with pytest.raises(Fatal, match=told):
        log.renew()
    with pytest.raises(Fatal, match=told):
        LearnerLog.connect(redis_url, wait_s=5.0).acquire(RUN, "learner", TTL_MS)
    assert {name: raw.dump(name) for name in held if not name.startswith(keys.STAGING.encode())} == held


@pytest.mark.promise("brokers-learners-meet-run")
async def test_a_learner_takes_over_a_run_without_a_layout_number(
    incarnations_store: Store, redis_url: str, raw: "redis.Redis"
) -> None:
    open_run(redis_url).close()
    raw.hdel(keys.STATE, "layout", "incarnation")
    with pytest.raises(StoreUnavailable, match=f"has layout {FIRST_LAYOUT}") as told:
        await incarnations_store.status()
    assert not isinstance(told.value, OtherRelease)
    log = open_run(redis_url)
    assert raw.hget(keys.STATE, "layout") == str(LAYOUT).encode()
    actor = await new_actor(incarnations_store)
    assert (await actor.append()).refusal is None
    log.close()
