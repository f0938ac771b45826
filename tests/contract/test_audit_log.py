"""The audit excuses exactly what a Redis that went back in time has lost, by session and sequence."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.actor.link.ack_journal import AckJournal
from penstock.broker.log.audit_log import HeldLog, LostFragments, read_log
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.store import Store
from penstock.launch.audit.books import Books, Lineage, read_journals
from penstock.launch.audit.findings import Kind, Problem
from penstock.protocol.messages import Role
from tests.support.run import small_run
from tests.support.run.store_run import BLOB, Actor, open_run, reconnect
from tests.support.storage.redis_server import RedisServer


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Store]:
    """A broker's view of the server."""
    found = Store.connect(redis_server.url)
    yield found
    await found.aclose()


class Recorded(Actor):
    """An actor that keeps a journal of what it saw acknowledged."""

    journal: AckJournal

    async def send(self, count: int) -> None:
        """Append as an actor does, and record the acknowledgements."""
        before = self.acked
        reply = await self.append(count)
        assert reply.refusal is None, reply.refusal
        self.journal.record(
            [small_run.fragment(self.session, one) for one in range(before + 1, self.acked + 1)]
        )


async def recorded(store: Store, name: str, folder: Path) -> Recorded:
    """A new session."""
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
    """As a learner does when a renewal says that the log is closed."""
    log.reopen(log.snapshot())
    log.publish(BLOB, update=0, settled=0, scalars={})


async def test_an_actor_that_comes_back_says_what_it_had_seen_acknowledged(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    log = open_run(redis_server.url, budget=10**6)
    returns, silent, read = [await recorded(store, name, tmp_path) for name in ("one", "two", "three")]
    for actor in (returns, silent, read):
        await actor.send(2)
    log.read(0, 100, 0)
    copy = redis_server.save_aof()
    for actor in (returns, silent):
        await actor.send(3)
    await read.send(4)
    entries = log.read(0, 100, 0)
    assert len(entries) == 16
    redis_server.go_back(copy)
    await reconnect(store)
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


async def test_what_was_not_read_is_booked_when_its_actor_says_so_or_is_gone(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    log = open_run(redis_server.url, budget=10**6)
    returns, ends = [await recorded(store, name, tmp_path) for name in ("one", "two")]
    for actor in (returns, ends):
        await actor.send(2)
    copy = redis_server.save_aof()
    for actor in (returns, ends):
        await actor.send(3)
    redis_server.go_back(copy)
    await reconnect(store)
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


async def test_what_a_session_lost_that_ends_before_the_log_is_open_again(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    log = open_run(redis_server.url, budget=10**6)
    actor = await recorded(store, "one", tmp_path)
    await actor.send(2)
    copy = redis_server.save_aof()
    await actor.send(3)
    redis_server.go_back(copy)
    await reconnect(store)
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
    copy = redis_server.save_aof()
    ghost = await recorded(store, "two", tmp_path)
    await ghost.send(2)
    redis_server.go_back(copy)
    await reconnect(store)
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
