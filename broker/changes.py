"""Wakes the held WatchLatest calls of this broker when something in the run changes.

A caller notes `generation`, looks at Redis, and waits for the generation to move on: a change between
the look and the wait is never lost. After `close` every wait returns at once, for the drain.
"""

import asyncio
from collections.abc import AsyncIterator


class Changes:
    """One per event loop."""

    def __init__(self) -> None:
        self.generation = 0
        self.closed = False
        self._moved = asyncio.Event()

    async def follow(self, source: AsyncIterator[None]) -> None:
        """Wake the waiters at every item of `source`, for ever."""
        async for _ in source:
            self._wake()

    def close(self) -> None:
        """Wake everybody, now and from now on."""
        self.closed = True
        self._wake()

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return when the generation is not `seen`, after `timeout_s`, or when closed."""
        if self.generation != seen or self.closed or timeout_s <= 0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._moved.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self.generation += 1
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
