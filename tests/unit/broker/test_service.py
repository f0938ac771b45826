"""How the tasks of a broker end."""

import asyncio

import pytest

from broker.service import _cancel, _until_first


async def swallow(times: int) -> None:
    """Go on for ever, and do not hear so many cancellations."""
    heard = 0
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            heard += 1
            if heard > times:
                raise


async def test_a_cancellation_that_is_swallowed_is_repeated() -> None:
    """A broker that was asked to end while its monitor wrote to Redis served on for ever."""
    tasks = {asyncio.create_task(swallow(times)) for times in (0, 1, 3)}
    await asyncio.sleep(0)
    ending = asyncio.create_task(_cancel(tasks))
    await asyncio.wait({ending}, timeout=20)
    ended = ending.done() and all(task.cancelled() for task in tasks)
    while left := [task for task in (ending, *tasks) if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.sleep(0)
    assert ended


async def test_the_error_of_a_task_beside_is_raised() -> None:
    """The change feed ends, and so does the broker, with its error."""

    async def fail() -> None:
        raise LookupError("gone")

    beside = {asyncio.create_task(fail())}
    with pytest.raises(LookupError, match="gone"):
        await _until_first(asyncio.sleep(3600), beside=beside)
