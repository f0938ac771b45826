"""How the tasks of a broker end."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest

from penstock.broker.log import connection
from penstock.broker.service.process import (
    Monitor,
    _cancel,
    _run,
    _until_first,
    assemble,
    build_frame,
    connect_inspector,
)
from penstock.config.settings import load
from penstock.runtime.health import Health
from penstock.runtime.metrics import EVENT_LOOP
from tests.support.run.broker_process import eventually


@dataclass
class Clock:
    """What time health thinks it is."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


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
    async def fail() -> None:
        raise LookupError("gone")

    beside = {asyncio.create_task(fail())}
    with pytest.raises(LookupError, match="gone"):
        await _until_first(asyncio.sleep(3600), beside=beside)


async def test_a_broker_that_drains_for_longer_than_it_may_stall_stays_live(redis_url: str) -> None:
    settings, clock, stop = load([{}]), Clock(), asyncio.Event()
    health = Health("broker", clock)
    inspector = connect_inspector(redis_url, settings.security)
    examine = partial(connection.examine, inspector, redis_url, settings.broker)
    frame = build_frame(settings, "127.0.0.1:0")
    parts = assemble(frame, settings, redis_url, await examine())
    monitor = Monitor(parts.store, health, settings.broker, examine, parts.experience.note_facts)
    running = asyncio.create_task(_run(parts, monitor, stop, health, drain_delay_s=3600))
    try:
        await asyncio.to_thread(eventually, lambda: health.unready() is None, "readiness")
        stop.set()
        await asyncio.to_thread(eventually, lambda: health.unready() == "draining", "the drain")
        clock.now_s += 2 * settings.broker.stall_timeout_s
        await asyncio.to_thread(eventually, lambda: not health.has_stalled(EVENT_LOOP), "a round of the loop")
        assert health.problem() is None
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await frame.close()
        await parts.store.aclose()
        await inspector.aclose()
