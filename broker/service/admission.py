"""What of an Append may go to the log: its fragments held against the run's specification.

The specification is read from Redis at most once a second, since a learner that is resumed may write other
bounds, and once more before anything is refused. Fragments are checked in order up to the first that breaks
the contract; a large request is checked on a thread, so that other calls go on.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import grpc

from penstock.broker.log.replies import AppendItem
from penstock.broker.log.store import StoreUnavailable
from penstock.protocol import append
from penstock.protocol import fragment as wire
from penstock.protocol.append import SentFragment
from penstock.protocol.fragment import FragmentHeader, header_from_proto
from penstock.protocol.limits import (
    APPEND_DEADLINE_S,
    CALL_DEADLINE_S,
    ENTRY_BYTES,
    HEADER_BYTES,
    KIB,
    MAX_MESSAGE_BYTES,
    MAX_NUMBER,
    MAX_WATCH_WAIT_MS,
    SLOT_BYTES,
    SPAN_BYTES,
    WATCH_GRACE_S,
)
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.specification import RunSpecification
from penstock.rpc.gate import Boundary, CallRule, Context, Malformed
from penstock.rpc.identity import CALLER
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint

CHECKED_ON_LOOP: Final = 16
ROWS_ON_LOOP: Final = 1024
"""More fragments, or more slots and spans in them, than this in one request are checked on a thread."""
REFRESH_INTERVAL_S: Final = 1.0
REFUSED_INTERVAL_S: Final = 0.05
"""What is read is that old at most when a fragment is refused by it."""
NOT_WRITTEN: Final = Refusal(
    reason=Reason.NOT_READY,
    detail="the learner has not written the run specification yet",
    retry_after_ms=500,
)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The fragments before the first bad one, and what is wrong with that one."""

    items: Sequence[AppendItem]
    refusal: Refusal | None


class Admission:
    """`read_specification()` answers the encoded specification, None before the learner wrote one.

    `confirm()` raises where the run is another incarnation than the one whose specification was read.
    """

    def __init__(
        self,
        read_specification: Callable[[], Awaitable[bytes | None]],
        confirm: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._confirm, self._clock = read_specification, confirm, clock
        self._encoded: bytes | None = None
        self._specification: RunSpecification | None = None
        self._read_at = -math.inf

    async def admit(self, session: int, messages: Sequence[SentFragment]) -> Admitted:
        specification = await self._newest_specification(REFRESH_INTERVAL_S)
        if specification is None:
            return Admitted((), NOT_WRITTEN)
        admitted = await _check_beside(session, messages, specification)
        if admitted.refusal is None:
            return admitted
        newer = await self._newest_specification(REFUSED_INTERVAL_S)
        if newer is not None and newer is not specification:
            admitted = await _check_beside(session, messages, newer)
        if admitted.refusal is not None:
            await self._confirm()
        return admitted

    def forget(self) -> None:
        """Read the specification anew: the run is another incarnation."""
        self._encoded = self._specification = None
        self._read_at = -math.inf

    async def _newest_specification(self, most_age_s: float) -> RunSpecification | None:
        """The specification as it was read at most so many seconds ago; None where there is none yet."""
        if self._clock() - self._read_at >= most_age_s:
            read_at = self._clock()
            encoded = await self._read()
            if encoded != self._encoded:
                self._specification = RunSpecification.decode(encoded) if encoded else None
                self._encoded = encoded
            self._read_at = read_at
        return self._specification


async def _check_beside(
    session: int, messages: Sequence[SentFragment], specification: RunSpecification
) -> Admitted:
    rows = sum(len(message.header.slots) + len(message.header.weights) for message in messages)
    if len(messages) > CHECKED_ON_LOOP or rows > ROWS_ON_LOOP:
        return await asyncio.to_thread(check_all, session, messages, specification)
    return check_all(session, messages, specification)


def check_all(session: int, messages: Sequence[SentFragment], specification: RunSpecification) -> Admitted:
    """The fragments that conform, in order, up to the first that does not."""
    items: list[AppendItem] = []
    for index, message in enumerate(messages):
        try:
            items.append(_check(session, message, specification))
        except ValueError as error:
            detail = f"fragments[{index}] (sequence {message.header.sequence}): {error}"
            return Admitted(items, Refusal(reason=Reason.INVALID, detail=detail))
    return Admitted(items, None)


def _check(session: int, message: SentFragment, specification: RunSpecification) -> AppendItem:
    header = header_from_proto(message.header)
    if header.session != session:
        raise ValueError(f"header.session={header.session}: the request is of session {session}")
    if header.sequence > MAX_NUMBER or header.round > MAX_NUMBER:
        raise ValueError(f"header.sequence={header.sequence}, round={header.round}: at most 2^53")
    if header.steps > specification.unroll_length:
        raise ValueError(
            f"header.steps={header.steps}: the run's unroll length is {specification.unroll_length}"
        )
    wire.check_header(header, specification.schema, specification.run)
    wire.check_table(header, len(message.payload), specification.schema)
    wire.check_content(header, message.payload, specification.bounds())
    encoded = message.header.SerializeToString()
    if len(encoded) > _header_room(header):
        raise ValueError(
            f"header: {len(encoded)} bytes with its unknown fields, {_header_room(header)} allowed"
        )
    return AppendItem(header=header, header_bytes=encoded, payload=message.payload)


def _header_room(header: FragmentHeader) -> int:
    """Most bytes of a header with so many rows; fields of a newer actor are stored with it."""
    return (
        HEADER_BYTES
        + SLOT_BYTES * len(header.slots)
        + SPAN_BYTES * len(header.weights)
        + ENTRY_BYTES * len(header.tensors)
    )


# ---- The bound on payload bytes that this broker has staged in Redis and not yet appended.

RETRY_AFTER_MS = 50


class StagingLimit:
    """Counts the bytes in flight of one event loop; not for several threads."""

    def __init__(self, ceiling_bytes: int) -> None:
        self.ceiling_bytes = ceiling_bytes
        self.staged_bytes = 0
        metrics.STAGED_BYTES.set_function(lambda: self.staged_bytes)

    def take(self, size: int) -> None:
        """Take `size` bytes of the ceiling, to be given back; raises Refused(FULL) when they do not fit.

        One append is always let in, so that a ceiling below one message slows down and never blocks.
        """
        if self.staged_bytes and self.staged_bytes + size > self.ceiling_bytes:
            detail = f"staging: {self.staged_bytes} of {self.ceiling_bytes} bytes in flight, {size} asked"
            raise Refused(Refusal(reason=Reason.FULL, detail=detail, retry_after_ms=RETRY_AFTER_MS))
        self.staged_bytes += size

    def give_back(self, size: int) -> None:
        self.staged_bytes -= size


# ---- A session belongs to the identity that opened it: no other appends to it, follows it or closes it.

MAX_REMEMBERED: Final = 16_384


def caller_name() -> str:
    """Return what a session's row keeps of its opener's identity; "" on a server that asks for none."""
    caller = CALLER.get()
    return "" if caller is None else str(caller)


class SessionOwners:
    """`read(session)` answers the owner of an open session, None where there is none.

    `confirm()` raises where the run is another incarnation than the one whose owners are remembered.
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
        """Ask again: in another incarnation of the run the numbers are those of other sessions."""
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


# ---- Whether the broker has work in hand: what a fault test reads to tell a busy moment from an idle one.

_HELD: Final = frozenset({"WatchLatest"})


class CallsInFlight:
    """The calls of one event loop."""

    def __init__(self) -> None:
        self.calls = 0

    def serving(self, name: str) -> AbstractContextManager[None]:
        return _Serving(self, 0 if name in _HELD else 1)


class _Serving(AbstractContextManager[None]):
    def __init__(self, all_calls: CallsInFlight, weight: int) -> None:
        self._all, self._weight = all_calls, weight

    def __enter__(self) -> None:
        self._all.calls += self._weight

    def __exit__(self, *_error: object) -> None:
        self._all.calls -= self._weight
        if not self._all.calls:
            failpoint("broker.waiting")


# ---- Rules of the broker's calls: how they are bounded, read and answered, and what every handler checks.

REDIS_DOWN_RETRY_MS: Final = 500
LARGEST_CALL_BYTES: Final = 16 * KIB
"""Largest request of a call without a rule of its own: a parser makes an object of two bytes."""
ORDINARY: Final = CallRule(largest_bytes=LARGEST_CALL_BYTES, deadline_s=CALL_DEADLINE_S)


RULES: Final = {
    "Append": CallRule(largest_bytes=MAX_MESSAGE_BYTES, deadline_s=APPEND_DEADLINE_S, parse=append.parse),
    # 256 KiB hold the largest report.
    "ReportEpisodes": CallRule(largest_bytes=256 * KIB, deadline_s=CALL_DEADLINE_S),
    "WatchLatest": CallRule(
        largest_bytes=LARGEST_CALL_BYTES,
        deadline_s=MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S,
        writes_bytes=True,
    ),
    "GetWeights": CallRule(largest_bytes=LARGEST_CALL_BYTES, deadline_s=CALL_DEADLINE_S, writes_bytes=True),
}


def build_boundary() -> Boundary:
    return Boundary(
        rules=RULES,
        ordinary=ORDINARY,
        process="broker",
        unavailable={StoreUnavailable: "redis"},
        in_flight=CallsInFlight().serving,
        on_malformed=metrics.REFUSALS.labels(reason="malformed").inc,
    )


def redis_down(reason: Reason, error: StoreUnavailable) -> Refusal:
    return Refusal(reason=reason, detail=f"redis: {error}", retry_after_ms=REDIS_DOWN_RETRY_MS)


def check_number(field: str, value: int) -> None:
    """Raise Malformed unless `value` is one that the broker gives: 1 .. 2^53."""
    if not 1 <= value <= MAX_NUMBER:
        raise Malformed(f"{field}={value}: give the number that the broker gave, from 1 to 2^53")


# ---- The last reply of this broker to each of the newest sessions.

MAX_REMEMBERED_SESSIONS: Final = 4096


class LastCredit:
    """One number by session; 0 where nothing was said."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, session: int) -> int:
        return self._numbers.get(session, 0)

    def note(self, session: int, number: int) -> None:
        """Note what was said now; the session that heard nothing for longest is forgotten."""
        if number == self[session]:
            return
        self._numbers[session] = number
        self._numbers.move_to_end(session)
        if len(self._numbers) > MAX_REMEMBERED_SESSIONS:
            self._numbers.popitem(last=False)

    def forget(self) -> None:
        """Forget every reply: nothing was said to the sessions of another incarnation of the run."""
        self._numbers.clear()


# ---- When those who come before the run is there should ask again.

LEAST_S: Final = 0.05
MOST_S: Final = 0.5
CALLS_PER_S: Final = 100.0


class AskingAgain:
    """Gives each caller a time of its own: a few are told of the run at once, and a crowd asks seldom.

    All together ask at most CALLS_PER_S times a second, unless each would wait for longer than MOST_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = -math.inf

    def after_ms(self) -> int:
        now_s = self._clock()
        due_s = max(now_s + LEAST_S, self._last_s + 1.0 / CALLS_PER_S)
        self._last_s = min(due_s, now_s + MOST_S)
        return round((self._last_s - now_s) * 1000)
