"""What of an Append may go to the log: its fragments held against the run's specification.

The specification is read from Redis at most once a second, since a learner that is resumed may write other
bounds, and once more before anything is refused. Fragments are checked in order up to the first that breaks
the contract; a large request is checked on a thread, so that other calls go on.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.broker.log.store_records import AppendItem
from penstock.protocol import conformance
from penstock.protocol.append import SentFragment
from penstock.protocol.header import FragmentHeader
from penstock.protocol.header_codec import header_from_proto
from penstock.protocol.limits import ENTRY_BYTES, HEADER_BYTES, MAX_NUMBER, SLOT_BYTES, SPAN_BYTES
from penstock.protocol.refusal import Reason, Refusal
from penstock.protocol.specification import RunSpecification

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
        """clock: returns seconds that only rise."""
        self._read, self._confirm, self._clock = read_specification, confirm, clock
        self._encoded: bytes | None = None
        self._specification: RunSpecification | None = None
        self._read_at = -math.inf

    async def admit(self, session: int, messages: Sequence[SentFragment]) -> Admitted:
        """Check the fragments of one Append of `session`."""
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
    """Check the fragments, on a thread where that takes long."""
    if len(messages) > CHECKED_ON_LOOP or _rows(messages) > ROWS_ON_LOOP:
        return await asyncio.to_thread(check_all, session, messages, specification)
    return check_all(session, messages, specification)


def _rows(messages: Sequence[SentFragment]) -> int:
    return sum(len(message.header.slots) + len(message.header.weights) for message in messages)


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
    schema, run, bounds = specification.schema, specification.run, specification.bounds()
    conformance.check(header, message.payload, schema, run, bounds)
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
