from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.actor.link.ack_journal import AckJournal
from penstock.broker.log.audit_log import HeldLog, LostFragments, read_log
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Commit, LogState, MissingReason, Opened, Residue
from penstock.broker.log.script import JUMP
from penstock.broker.log.store import Store
from penstock.launch.audit.books import Books, Lineage, read_journals
from penstock.launch.audit.findings import Kind, Problem
from penstock.protocol.messages import Episode, Report, Role, Watch
from penstock.protocol.refusal import Reason, Refusal, Refused
from tests.support.run import small_run
from tests.support.run.small_run import CHARGE, RUN, specification
from tests.support.run.store_run import BLOB, PACING, TTL_MS, Actor, Begin, new_actor, open_run, reconnect
from tests.support.storage.redis_server import RedisServer


@pytest.fixture
def log(begin: Begin) -> LearnerLog:
    return begin(budget=8 * CHARGE)


@asynccontextmanager
async def rewound(server: RedisServer, store: Store, log: LearnerLog | None = None) -> AsyncIterator[None]:
    """Redis goes back behind what is done in the block; the learner opens the log again."""
    copy = server.save_aof()
    yield
    server.go_back(copy)
    await reconnect(store)
    if log is not None:
        log.reopen(log.snapshot())


async def test_a_restarted_redis_is_closed_until_the_learner_opens_it(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    await actor.append(2)
    redis_server.restart()
    await reconnect(store)
    reply = await store.append(actor.session, 2, [])
    assert reply.refusal is not None
    assert (reply.refusal.reason, reply.refusal.retry_after_ms > 0) == (Reason.FULL, True)
    watched = await store.watch(Watch(session=actor.session))
    assert watched.refusal is not None
    assert watched.refusal.reason is Reason.NOT_READY
    refusal = await store.open_session("actor-1", Role.ROLLOUT)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NOT_READY
    assert log.renew().closed
    assert (await store.status()).closed
    for call in (lambda: log.settle(1), lambda: log.publish(BLOB, update=1, settled=0, scalars={})):
        with pytest.raises(Refused, match="not_ready"):
            call()
    log.reopen(log.snapshot())
    assert not log.renew().closed
    actor.acked = 2
    assert (await actor.append(2)).refusal is None
    assert (log.acked(), log.log_lost(), log.residue(0).entries) == (4, 0, 4)


@pytest.mark.promise("versions-never-used-twice")
async def test_reopening_skips_numbers_and_fences_the_old_epoch(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    await new_actor(store)
    redis_server.restart()
    await reconnect(store)
    epoch = log.epoch
    log.reopen(log.snapshot())
    leap = log.epoch - epoch
    assert leap >= JUMP
    assert log.publish(BLOB, update=0, settled=0, scalars={}).version == leap + 2
    opened = await store.open_session("actor-1", Role.ROLLOUT)
    assert isinstance(opened, Opened)
    assert opened.session == leap + 2
    other = LearnerLog.connect(redis_server.url, wait_s=1)
    other._memory.replace(epoch=epoch)
    with pytest.raises(Refused, match="fenced"):
        other.renew()
    other.close()


@pytest.mark.promise("entries-returned-redis-lost")
async def test_lost_entries_are_found_booked_and_passed(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    await actor.append(2)
    async with rewound(redis_server, store):
        await actor.append(2)
        assert len(log.read(0, 10, 0)) == 4
        await actor.append(2)
    log.renew()
    log.reopen(log.snapshot())
    assert log.acked() == 4
    await actor.watch()
    assert (await actor.append()).refusal is None
    # 1, 2 there; 3, 4 lost though read; 5, 6 lost unread (the actor's own count tells); 7 is new.
    assert (log.acked(), log.log_lost()) == (7, 2)
    entries = log.read(0, 10, 0)
    assert [(entry.number, entry.header is None) for entry in entries] == [
        (1, False), (2, False), (4, True), (5, False),
    ]  # fmt: skip
    payloads = log.fetch([1, 2, 3, 4, 5])
    assert [payload is None for payload in payloads] == [False, False, True, True, False]
    assert [log.missing(3), log.missing(4)] == [MissingReason.LOG_LOST, MissingReason.LOG_LOST]
    trained, lost_by_hole = 3, 2
    assert log.acked() == trained + lost_by_hole + log.log_lost()


@pytest.mark.promise("fragments-returned-redis-lost")
async def test_lost_entries_that_were_not_read_are_in_the_books(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    await actor.append(2)
    async with rewound(redis_server, store, log):
        await actor.append(4)
        log.read(0, 10, 0)
    position = 1
    residue = log.residue(position)
    assert residue == Residue(entries=1, lost=4)
    assert log.acked() == position + residue.entries + residue.lost + log.log_lost()


async def test_an_actor_that_lies_on_reopening_holds_only_its_share(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    liar, _honest = await new_actor(store, "actor-0"), await new_actor(store, "actor-1")
    redis_server.restart()
    await reconnect(store)
    log.reopen(log.snapshot())
    log.publish(BLOB, update=0, settled=0, scalars={})
    await store.watch(Watch(session=liar.session, begun_through=2**53 - 1))
    most = 8
    assert (await store.status()).outstanding_steps <= 2 * most * CHARGE
    liar.acked = PACING.max_log_entries
    assert (await liar.append()).refusal is None
    assert log.log_lost() == PACING.max_log_entries
    liar.acked += PACING.max_log_entries
    refused = (await liar.append()).refusal
    assert refused is not None
    assert (refused.reason, log.log_lost()) == (Reason.GAP, PACING.max_log_entries)
    liar.acked = PACING.max_log_entries + 1
    replies = [(await liar.append()).refusal for _ in range(3 * most)]
    assert [refusal and refusal.reason for refusal in replies[-most:]] == [Reason.INVALID] * most


async def test_a_session_opened_after_a_re_opening_has_no_privilege(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    redis_server.restart()
    await reconnect(store)
    log.reopen(log.snapshot())
    log.publish(BLOB, update=0, settled=0, scalars={})
    actor = await new_actor(store)
    await actor.work()
    without_credit = (await actor.append()).refusal
    actor.acked += 5
    claim = (await actor.append()).refusal
    assert without_credit is not None
    assert claim is not None
    assert (without_credit.reason, claim.reason, log.log_lost()) == (Reason.INVALID, Reason.GAP, 0)


async def test_sessions_are_not_expired_sooner_than_one_timeout_after_opening(
    redis_server: RedisServer, store: Store, redis_url: str, begin: Begin
) -> None:
    log = begin(session_timeout_ms=300)
    actor = await new_actor(store)
    redis_server.restart()
    await reconnect(store)
    client = redis.Redis.from_url(redis_url)
    client.set("wait", b"", px=400)
    while client.exists("wait"):
        pass
    log.reopen(log.snapshot())
    assert log.renew().expired_sessions == 0
    assert (await actor.append()).refusal is None
    client.close()


@pytest.mark.promise("sessions-epochs-never-used")
async def test_numbers_that_redis_lost_are_not_skipped_twice(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    copy, kept = redis_server.save_aof(), log.snapshot()
    sessions, versions, epochs = set[int](), set[int](), set[int]()
    for index in range(3):
        redis_server.go_back(copy)
        await reconnect(store)
        learner = LearnerLog.connect(redis_server.url, wait_s=5)
        epochs.add(learner.acquire(RUN, "learner", TTL_MS).epoch)
        learner.start(specification().encode(), PACING, kept, position=0)
        epochs.add(learner.epoch)
        opened = await store.open_session(f"actor-{index}", Role.ROLLOUT)
        assert isinstance(opened, Opened)
        sessions.add(opened.session)
        versions.add(learner.publish(BLOB, update=0, settled=0, scalars={}).version)
        learner.close()
    assert (len(sessions), len(versions), len(epochs)) == (3, 3, 6)


async def test_reports_are_taken_again_after_a_rewind(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    episode = Episode(slot_id=0, episode_id=0, episode_return=1, length=1, terminated=True, version=1)
    async with rewound(redis_server, store, log):
        for sequence in (1, 2):
            await store.report(Report(session=actor.session, sequence=sequence, episodes=(episode,)))
        assert [entry.number for entry in log.read_reports(0, 10)] == [1, 2]
    assert await store.report(Report(session=actor.session, sequence=3, episodes=(episode,))) == (3, None)
    assert [entry.number for entry in log.read_reports(2, 10)] == [3]


async def test_an_empty_redis_is_opened_from_memory(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    await actor.append(4)
    log.read(0, 10, 0)
    commit = Commit(checkpoint_id="c", manifest_sha256="a", position=3, trim=2)
    log.commit(commit)
    redis_server.restart_empty()
    await reconnect(store)
    assert log.renew().closed
    epoch = log.epoch
    log.reopen(log.snapshot())
    log.publish(BLOB, update=1, settled=4, scalars={})
    opened = await actor.open()
    assert (opened.specification, opened.session) == (specification().encode(), log.epoch - epoch + 2)
    assert await actor.work() == 8
    assert [entry.number for entry in log.read(4, 10, 0)] == list(range(5, 13))
    assert log.acked() == 12
    lease = log.acquire(RUN, "learner", TTL_MS)
    assert (lease.committed, lease.trim_floor) == ((commit,), 2)


async def test_an_empty_redis_is_opened_from_a_checkpoint(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    await actor.append(6)
    log.read(0, 10, 0)
    kept = log.snapshot().to_json()
    redis_server.restart_empty()
    await reconnect(store)
    resumed = LearnerLog.connect(redis_server.url, wait_s=5)
    lease = resumed.acquire(RUN, "learner", TTL_MS)
    assert (lease.fresh, lease.closed) == (True, True)
    resumed.start(specification().encode(), PACING, LogState.from_json(kept), position=4)
    resumed.publish(BLOB, update=1, settled=4, scalars={})
    assert resumed.epoch > log.epoch + JUMP - 1
    (hole,) = resumed.read(4, 10, 0)
    assert (hole.number, hole.header) == (6, None)
    assert [resumed.missing(5), resumed.missing(6)] == [MissingReason.LOG_LOST, MissingReason.LOG_LOST]
    resumed.settle(6)
    assert resumed.renew().outstanding == 0
    await actor.open()
    assert await actor.work() == 4
    resumed.close()


@pytest.mark.promise("holds-redis-forgotten-lease")
async def test_a_learner_that_takes_over_a_returned_redis_fences_the_one_it_forgot(
    redis_server: RedisServer, log: LearnerLog
) -> None:
    log.release()
    copy = redis_server.save_aof()
    first = LearnerLog.connect(redis_server.url, wait_s=5)
    first.acquire(RUN, "first", TTL_MS)
    redis_server.go_back(copy)
    second = LearnerLog.connect(redis_server.url, wait_s=5)
    assert second.acquire(RUN, "second", TTL_MS).epoch > first.epoch
    with pytest.raises(Refused, match="fenced"):
        first.renew()
    first.close()
    second.close()


@pytest.mark.promise("redis-restarts-log-being")
def test_a_redis_that_restarts_while_it_is_opened_is_opened_again(
    redis_server: RedisServer, log: LearnerLog
) -> None:
    redis_server.restart()
    names: list[str] = []
    run = log._calls.run

    def restart_behind_the_first_opening(name: str, *arguments: object) -> object:
        names.append(name)
        if name == "trim" and names.count("open_log") == 1:
            redis_server.restart()
        return run(name, *arguments)

    log._calls.run = restart_behind_the_first_opening  # type: ignore[method-assign]
    log.reopen(log.snapshot())
    assert (names.count("open_log"), log.renew().closed) == (2, False)


def test_opening_again_with_the_same_nonce_skips_numbers_once(
    redis_server: RedisServer, log: LearnerLog
) -> None:
    redis_server.restart()
    calls: list[tuple[object, ...]] = []
    run = log._calls.run

    def run_twice(name: str, *arguments: object) -> object:
        if name == "open_log":
            calls.append(arguments)
            run(name, *arguments)
        return run(name, *arguments)

    log._calls.run = run_twice  # type: ignore[method-assign]
    epoch = log.epoch
    log.reopen(log.snapshot())
    assert len(calls) == 1
    assert log.epoch >= epoch + JUMP
    # A second leap would have left this epoch behind.
    assert not log.renew().closed


def test_commits_keep_their_order_however_often_a_log_is_opened_again(
    redis_server: RedisServer, log: LearnerLog
) -> None:
    commits = [
        Commit(checkpoint_id=f"{number:012d}-00000001", manifest_sha256="", position=0, trim=0)
        for number in range(1, 10)
    ]
    for commit in commits:
        log.commit(commit)
    state = replace(log.snapshot(), commits=tuple(commits))
    for _ in range(3):
        redis_server.restart()
        log.acquire(RUN, "learner", TTL_MS)
        log.start(specification().encode(), PACING, resume=state)
        lease = log.acquire(RUN, "learner", TTL_MS)
        assert [commit.checkpoint_id for commit in lease.committed] == [
            commit.checkpoint_id for commit in commits[1:]
        ]


class Recorded(Actor):
    """An actor that keeps a journal of what it saw acknowledged."""

    journal: AckJournal

    async def send(self, count: int) -> None:
        before = self.acked
        reply = await self.append(count)
        assert reply.refusal is None, reply.refusal
        self.journal.record(
            [small_run.fragment(self.session, one) for one in range(before + 1, self.acked + 1)]
        )


async def recorded(store: Store, name: str, folder: Path) -> Recorded:
    actor = Recorded(
        store, name, role=Role.SERVER
    )  # appends without credit: sessions need not share a budget
    actor.journal = AckJournal(folder, small_run.RUN, name)
    await actor.open()
    return actor


def held(server: RedisServer) -> HeldLog:
    """What the audit reads."""
    log = read_log(server.url)
    assert log is not None
    return log


def problems(folder: Path, log: HeldLog) -> list[Problem]:
    """Of the books without a learner: everything is in the log, or lost."""
    return list(Books(read_journals([folder], small_run.RUN), Lineage(), log).check())


def reopen(log: LearnerLog) -> None:
    log.reopen(log.snapshot())
    log.publish(BLOB, update=0, settled=0, scalars={})


async def test_a_returning_actor_reports_its_acknowledged_fragments(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    log = open_run(redis_server.url, budget=10**6)
    returns, silent, read = [await recorded(store, name, tmp_path) for name in ("one", "two", "three")]
    for actor in (returns, silent, read):
        await actor.send(2)
    log.read(0, 100, 0)
    async with rewound(redis_server, store):
        for actor in (returns, silent):
            await actor.send(3)
        await read.send(4)
        entries = log.read(0, 100, 0)
        assert len(entries) == 16
    reopen(log)
    silent_range = LostFragments(session=silent.session, first=6, last=None)
    assert silent_range in held(redis_server).lost_fragments
    assert problems(tmp_path, held(redis_server)) == []

    await returns.watch()
    await returns.send(1)
    found = held(redis_server)
    assert not [one for one in found.lost_fragments if one.session == returns.session and one.last is None]
    assert problems(tmp_path, found) == []
    books = Books(read_journals([tmp_path], small_run.RUN), Lineage(), found)
    list(books.check())
    assert books.journalled == {"resident": 7, "log_lost": 10, "nowhere": 0}


async def test_unread_entries_are_booked_when_their_actor_reports_them_or_is_gone(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    log = open_run(redis_server.url, budget=10**6)
    returns, ends = [await recorded(store, name, tmp_path) for name in ("one", "two")]
    for actor in (returns, ends):
        await actor.send(2)
    async with rewound(redis_server, store):
        for actor in (returns, ends):
            await actor.send(3)
    reopen(log)
    await returns.watch()
    await returns.send(1)
    await store.close_session(ends.session)
    await store.close_session(returns.session)
    found = held(redis_server)
    assert LostFragments(session=returns.session, first=3, last=5) in found.lost_fragments
    assert LostFragments(session=ends.session, first=3, last=None) in found.lost_fragments
    assert not [one for one in found.lost_fragments if one.session == returns.session and one.last is None]
    assert found.counters["log_lost"] == 3
    assert problems(tmp_path, found) == []
    returns.journal.record([small_run.fragment(returns.session, 7)])
    (lost,) = problems(tmp_path, held(redis_server))
    assert (lost.kind, lost.session, lost.first) == (Kind.LOST, returns.session, 7)


async def test_losses_of_a_session_that_ends_before_the_log_is_open_are_booked(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    log = open_run(redis_server.url, budget=10**6)
    actor = await recorded(store, "one", tmp_path)
    await actor.send(2)
    async with rewound(redis_server, store):
        await actor.send(3)
    await store.close_session(actor.session)
    reopen(log)
    found = held(redis_server)
    assert LostFragments(session=actor.session, first=3, last=None) in found.lost_fragments
    assert problems(tmp_path, found) == []


async def test_a_session_of_lost_seconds_is_known_by_its_number(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    log = open_run(redis_server.url, budget=10**6)
    first = await recorded(store, "one", tmp_path)
    await first.send(1)
    async with rewound(redis_server, store):
        ghost = await recorded(store, "two", tmp_path)
        await ghost.send(2)
    reopen(log)
    assert problems(tmp_path, held(redis_server)) == []
    later = await recorded(store, "two", tmp_path)
    later.journal.record([small_run.fragment(later.session, 1)])
    (lost,) = problems(tmp_path, held(redis_server))
    assert (lost.kind, lost.session) == (Kind.LOST, later.session)


async def test_without_a_loss_of_redis_nothing_is_excused(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    open_run(redis_server.url, budget=10**6)
    actor = await recorded(store, "one", tmp_path)
    await actor.send(2)
    await store.close_session(actor.session)
    assert held(redis_server).lost_fragments == ()
    assert problems(tmp_path, held(redis_server)) == []
    actor.journal.record([small_run.fragment(actor.session, 3)])
    (lost,) = problems(tmp_path, held(redis_server))
    assert (lost.kind, lost.first, lost.last) == (Kind.LOST, 3, 3)
