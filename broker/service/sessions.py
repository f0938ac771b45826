"""What a broker remembers of sessions: owners, the last replies to them, and the calls it holds for them."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from penstock.broker.log.replies import Change, Scope
from penstock.broker.log.store import StoreUnavailable
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import Reason, Refusal
from penstock.rpc.gate import Context, Malformed
from penstock.rpc.identity import CALLER
from penstock.runtime import metrics
from penstock.v1 import refusal_pb2 as pb

REDIS_DOWN_RETRY_MS: Final = 500


def redis_down(reason: Reason, error: StoreUnavailable) -> Refusal:
    return Refusal(reason=reason, detail=f"redis: {error}", retry_after_ms=REDIS_DOWN_RETRY_MS)


def counted(refusal: Refusal | None) -> pb.Refusal | None:
    """Count a refusal by its reason, and return its message; None where nothing was refused."""
    if refusal is None:
        return None
    metrics.REFUSALS.labels(reason=refusal.reason.label).inc()
    return refusal.to_proto()


def check_number(field: str, value: int) -> None:
    """Raise Malformed unless `value` is one that the broker gives: 1 .. 2^53."""
    if not 1 <= value <= MAX_NUMBER:
        raise Malformed(f"{field}={value}: give the number that the broker gave, from 1 to 2^53")


# ---- A session belongs to the identity that opened it: no other appends to it, follows it or closes it.

MAX_REMEMBERED: Final = 16_384


def caller_name() -> str:
    """Return the identity of the caller as a session keeps it; "" on a server that asks for none."""
    caller = CALLER.get()
    return "" if caller is None else str(caller)


class SessionOwners:
    """Which identity opened each session, so that no other uses it.

    read: returns the owner of an open session, None where no such session is open. confirm: raises where the
    run is another incarnation than the one whose owners are remembered.
    """

    def __init__(
        self, read: Callable[[int], Awaitable[str | None]], confirm: Callable[[], Awaitable[None]]
    ) -> None:
        self._read, self._confirm = read, confirm
        self._owners: OrderedDict[int, str] = OrderedDict()

    async def check_name(self, actor_id: str, context: Context) -> None:
        """End the call PERMISSION_DENIED when the caller may not act under this name."""
        caller = CALLER.get()
        if caller is not None and not caller.may_act_as(actor_id):
            text = f"actor_id={actor_id!r}: {caller} may act as {caller.name!r} and {caller.name!r}-…"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    async def check(self, session: int, context: Context) -> None:
        """End the call PERMISSION_DENIED when the session is another's."""
        caller = caller_name()
        if not caller or not session:
            return
        owner = await self._owner(session)
        if owner and owner != caller:
            await self._confirm()
            text = f"session={session}: {caller} did not open it; open one of your own"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    def forget(self) -> None:
        """Forget every owner: in another incarnation of the run the numbers are those of other sessions."""
        self._owners.clear()

    async def _owner(self, session: int) -> str | None:
        known = self._owners.get(session)
        if known is not None:
            return known
        owner = await self._read(session)
        if owner is not None:
            self._owners[session] = owner
            while len(self._owners) > MAX_REMEMBERED:
                self._owners.popitem(last=False)
        return owner


# ---- The last reply of this broker to each of the newest sessions.

MAX_REMEMBERED_SESSIONS: Final = 4096


class LastCredit:
    """The number in the last reply to each session; 0 for a session without a reply."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, session: int) -> int:
        return self._numbers.get(session, 0)

    def note(self, session: int, number: int) -> None:
        """Note the number of a reply; beyond the bound the session with the oldest reply is forgotten."""
        if number == self[session]:
            return
        self._numbers[session] = number
        self._numbers.move_to_end(session)
        if len(self._numbers) > MAX_REMEMBERED_SESSIONS:
            self._numbers.popitem(last=False)

    def forget(self) -> None:
        """Forget every reply: the sessions of another incarnation of the run have had none."""
        self._numbers.clear()


# ---- Wakes the held WatchLatest calls of this broker when something in the run changes for them.

GAP_S: Final = 0.02
"""Many are woken at most this often: each look of each of them asks Redis."""
LOOK_AGAIN_S: Final = 5.0
"""A call that looked so long ago looks again at the next heartbeat: a message may have been lost."""


class Held:
    """A WatchLatest that is held. waits: whether its session waits for credit."""

    def __init__(self) -> None:
        self.waits = False
        self.is_newest = True
        self._woken = asyncio.Event()
        self._looked_s = -math.inf

    def begin_look(self) -> None:
        """Note the time of a look; a change from now on ends the next wait."""
        self._woken.clear()
        self._looked_s = asyncio.get_running_loop().time()

    async def wait(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        self._woken.set()

    def is_old(self, now_s: float) -> bool:
        return now_s - self._looked_s >= LOOK_AGAIN_S


class Changes:
    """Holds the WatchLatest calls of one event loop, and wakes those that a change of the run concerns."""

    def __init__(self) -> None:
        self.closed = False
        self._held: dict[int, Held] = {}
        self._pending = Scope.NAMED
        self._woke_s = -math.inf
        self._later: asyncio.TimerHandle | None = None

    @contextmanager
    def holding(self, session: int) -> Iterator[Held]:
        """Hold a call of a session. Of several calls of one session only the newest waits."""
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
        """Note whether the session waits for credit, by the reply to another call of it."""
        held = self._held.get(session)
        if held is not None:
            held.waits = waits

    async def follow(self, source: AsyncIterator[Change | None]) -> None:
        """Wake for every change of `source`, for ever; None is a heartbeat."""
        async for change in source:
            if change is None:
                now_s = asyncio.get_running_loop().time()
                self._wake(held for held in self._held.values() if held.is_old(now_s))
                continue
            self._wake(held for session in change.sessions if (held := self._held.get(session)))
            if change.scope is not Scope.NAMED:
                self._wake_many(change.scope)

    def close(self) -> None:
        """Wake every held call, now and from now on."""
        self.closed = True
        self._wake(self._held.values())

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
