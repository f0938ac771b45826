"""Waking the held calls."""

import asyncio
from collections.abc import AsyncIterator

from broker.service.changes import Changes


async def _feed(queue: "asyncio.Queue[None]") -> AsyncIterator[None]:
    while True:
        await queue.get()
        yield


async def test_a_change_wakes_every_waiter() -> None:
    """All of them, long before their time is over."""
    changes, queue = Changes(), asyncio.Queue[None]()
    following = asyncio.create_task(changes.follow(_feed(queue)))
    waiters = [asyncio.create_task(changes.wait(changes.generation, 60)) for _ in range(5)]
    await asyncio.sleep(0)
    queue.put_nowait(None)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiters)
    following.cancel()


async def test_a_change_between_look_and_wait_is_not_lost() -> None:
    """The wait returns at once because the generation moved on."""
    changes, queue = Changes(), asyncio.Queue[None]()
    following = asyncio.create_task(changes.follow(_feed(queue)))
    seen = changes.generation
    queue.put_nowait(None)
    async with asyncio.timeout(5):
        await changes.wait(seen, 60)
        await changes.wait(seen, 60)
    following.cancel()


async def test_a_wait_ends_with_its_time() -> None:
    """Without a change."""
    changes = Changes()
    async with asyncio.timeout(5):
        await changes.wait(changes.generation, 0.01)
    assert changes.generation == 0


async def test_closing_wakes_and_nobody_waits_any_more() -> None:
    """The drain answers held calls at once."""
    changes = Changes()
    waiter = asyncio.create_task(changes.wait(changes.generation, 60))
    await asyncio.sleep(0)
    changes.close()
    async with asyncio.timeout(5):
        await waiter
        await changes.wait(changes.generation, 60)


async def test_a_burst_of_changes_wakes_twice() -> None:
    """At once for the first, once more for all that follow.

    Two hundred actors that connect ask Redis 400 times, not 40,000.
    """
    changes, queue = Changes(), asyncio.Queue[None]()
    following = asyncio.create_task(changes.follow(_feed(queue)))
    for _ in range(200):
        queue.put_nowait(None)
    async with asyncio.timeout(5):
        await changes.wait(0, 60)
        assert changes.generation == 1
        for _ in range(1000):
            await asyncio.sleep(0)
        assert queue.empty()
        await changes.wait(1, 60)
    assert changes.generation == 2
    following.cancel()
