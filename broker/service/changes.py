"""Wakes the held WatchLatest calls of this broker when something in the run changes for them.

A held call looks at Redis, and waits until it is woken to look again: a wake between the look and the wait is
never lost. Sessions that are named are woken at once. Who waits for credit is woken by nothing else but what
concerns everybody: without credit there is nothing to do with new weights. What wakes many comes at most once
in `GAP_S`. After `close` every wait returns at once, for the drain.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from penstock.broker.log.store_records import Change, Scope

GAP_S: Final = 0.02
"""Many are woken at most this often: each look of each of them asks Redis."""
LOOK_AGAIN_S: Final = 5.0
"""A call whose last look is as old as this looks again at the next heartbeat, in case a message was lost."""


class Held:
    """A call that is held. waits: its session has no credit, and its turn is to come."""

    def __init__(self) -> None:
        self.waits = False
        self.is_newest = True
        self._woken = asyncio.Event()
        self._looked_s = -math.inf

    def begin_look(self) -> None:
        """From now on a change ends the next wait."""
        self._woken.clear()
        self._looked_s = asyncio.get_running_loop().time()

    async def wait(self, timeout_s: float) -> None:
        """Return when woken, or after `timeout_s`."""
        if timeout_s <= 0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """Have it look again."""
        self._woken.set()

    def is_old(self, now_s: float) -> bool:
        """Return whether its last look was long ago."""
        return now_s - self._looked_s >= LOOK_AGAIN_S


class Changes:
    """One per event loop."""

    def __init__(self) -> None:
        self.closed = False
        self._held: dict[int, Held] = {}
        self._pending = Scope.NAMED
        self._woke_s = -math.inf
        self._later: asyncio.TimerHandle | None = None

    @contextmanager
    def holding(self, session: int) -> Iterator[Held]:
        """A call of a session is held. Of several only the newest looks on."""
        held, older = Held(), self._held.get(session)
        if older is not None:
            older.is_newest = False
            older.wake()
        self._held[session] = held
        try:
            yield held
        finally:
            if self._held.get(session) is held:
                del self._held[session]

    def note_waiting(self, session: int, waits: bool) -> None:
        """A reply to another call of this session said whether it waits for credit."""
        held = self._held.get(session)
        if held is not None:
            held.waits = waits

    async def follow(self, source: AsyncIterator[Change | None]) -> None:
        """Wake for every change of `source`, for ever; None is a heartbeat."""
        async for change in source:
            if change is None:
                self._wake_old()
                continue
            self._wake(held for session in change.sessions if (held := self._held.get(session)))
            if change.scope is not Scope.NAMED:
                self._wake_many(change.scope)

    def close(self) -> None:
        """Wake everybody, now and from now on."""
        self.closed = True
        self._wake(self._held.values())

    def _wake_old(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._wake(held for held in self._held.values() if held.is_old(now_s))

    def _wake_many(self, scope: Scope) -> None:
        loop = asyncio.get_running_loop()
        self._pending = max(self._pending, scope)
        missing_s = self._woke_s + GAP_S - loop.time()
        if self._later is not None:
            return
        if missing_s > 0:
            self._later = loop.call_later(missing_s, self._wake_pending)
        else:
            self._wake_pending()

    def _wake_pending(self) -> None:
        scope, self._pending = self._pending, Scope.NAMED
        self._later, self._woke_s = None, asyncio.get_running_loop().time()
        self._wake(held for held in self._held.values() if scope is Scope.ALL or not held.waits)

    @staticmethod
    def _wake(calls: Iterable[Held]) -> None:
        for held in calls:
            held.wake()
