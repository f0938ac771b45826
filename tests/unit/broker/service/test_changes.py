"""Waking the held calls."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.broker.log.replies import Change, Scope
from penstock.broker.service.sessions import Changes, Held

Feed = asyncio.Queue[Change | None]


async def _source(feed: Feed) -> AsyncIterator[Change | None]:
    while True:
        yield await feed.get()


@pytest.fixture
async def feed() -> Feed:
    """Changes to come."""
    return Feed()


@pytest.fixture
async def changes(feed: Feed) -> AsyncIterator[Changes]:
    """A broker that follows them."""
    made = Changes()
    following = asyncio.create_task(made.follow(_source(feed)))
    yield made
    following.cancel()


async def _is_woken(held: Held) -> bool:
    """Whether a wait ends though its time is long."""
    for _ in range(50):
        await asyncio.sleep(0)
    waiting = asyncio.create_task(held.wait(60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    woken = waiting.done()
    waiting.cancel()
    return woken


async def test_a_change_of_everything_wakes_everybody(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as working, changes.holding(2) as waiting:
        waiting.waits = True
        feed.put_nowait(Change())
        assert await _is_woken(working)
        assert await _is_woken(waiting)


@pytest.mark.promise("publication-wakes-credit-wait")
async def test_who_waits_for_credit_is_woken_by_name_only(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as working, changes.holding(2) as next_one, changes.holding(3) as waiting:
        changes.note_waiting(2, True)
        changes.note_waiting(3, True)
        feed.put_nowait(Change((2,), Scope.READY))
        assert [await _is_woken(held) for held in (working, next_one, waiting)] == [True, True, False]


async def test_a_name_wakes_no_other_watch(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as other, changes.holding(2) as named:
        feed.put_nowait(Change((2, 77), Scope.NAMED))
        assert [await _is_woken(held) for held in (other, named)] == [False, True]


async def test_a_change_between_look_and_wait_is_not_lost(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as held:
        held.begin_look()
        feed.put_nowait(Change((1,), Scope.NAMED))
        assert await _is_woken(held)
        held.begin_look()
        assert not await _is_woken(held)


async def test_only_the_newest_call_of_a_session_looks_on(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as older, changes.holding(1) as newer:
        assert (older.is_newest, newer.is_newest) == (False, True)
        assert await _is_woken(older)
        assert not await _is_woken(newer)


async def test_a_heartbeat_wakes_who_has_not_looked_for_long(changes: Changes, feed: Feed) -> None:
    with changes.holding(1) as fresh, changes.holding(2) as old:
        fresh.begin_look()
        feed.put_nowait(None)
        assert [await _is_woken(held) for held in (fresh, old)] == [False, True]


async def test_a_wait_ends_with_its_time() -> None:
    with Changes().holding(1) as held:
        await held.wait(0.01)
        await held.wait(0)


async def test_closing_wakes_everybody(changes: Changes) -> None:
    with changes.holding(1) as held:
        held.waits = True
        changes.close()
        assert await _is_woken(held)
        assert changes.closed


async def test_a_burst_of_changes_wakes_twice(changes: Changes, feed: Feed) -> None:
    woken = 0
    with changes.holding(1) as held:
        for _ in range(200):
            feed.put_nowait(Change())
        async with asyncio.timeout(5):
            for _ in range(2):
                held.begin_look()
                await held.wait(60)
                woken += 1
        held.begin_look()
        assert feed.empty()
        assert not await _is_woken(held)
    assert woken == 2
