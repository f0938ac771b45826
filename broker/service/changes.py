"""Wakes the held WatchLatest calls of this broker when something in the run changes.

A caller notes `generation`, looks at Redis, and waits for the generation to move on: a change between
the look and the wait is never lost. The first change wakes at once; those that follow closely, as when many
actors connect, wake together a moment later. After `close` every wait returns at once, for the drain.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Final

GAP_S: Final = 0.02
"""Everybody is woken at most this often: each look of each waiter asks Redis."""


class Changes:
    """One per event loop."""

    def __init__(self) -> None:
        self.generation = 0
        self.closed = False
        self._moved = asyncio.Event()
        self._woke_s = -math.inf
        self._later: asyncio.TimerHandle | None = None

    async def follow(self, source: AsyncIterator[None]) -> None:
        """Wake the waiters at every item of `source`, for ever."""
        loop = asyncio.get_running_loop()
        async for _ in source:
            if self._later is not None:
                continue
            missing_s = self._woke_s + GAP_S - loop.time()
            if missing_s > 0:
                self._later = loop.call_later(missing_s, self._wake)
            else:
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
        self._later, self._woke_s = None, asyncio.get_running_loop().time()
        self.generation += 1
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
