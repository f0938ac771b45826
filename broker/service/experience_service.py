"""ExperienceService: sessions, fragments and episode reports on their way up to the log.

What the log or this broker does not take is a refusal inside an ordinary reply. An append that has
begun is finished even when its caller hangs up: the caller sends it again, and the reply acknowledges it.
While Redis does not answer, calls are answered FULL or NOT_READY with a time to wait.

What of an Append may go to the log is held against the run's specification. That is read from Redis at most
once a second, since a learner that is resumed may write other bounds, and once more before anything is
refused. Fragments are checked in order up to the first that breaks the contract; a large request is checked
on a thread, so that other calls go on.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from penstock.broker.log.connection import ServerFacts
from penstock.broker.log.replies import Appended, AppendItem
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.broker.service.sessions import (
    Changes,
    LastCredit,
    SessionOwners,
    caller_name,
    check_number,
    counted,
    redis_down,
)
from penstock.protocol import fragment as wire
from penstock.protocol.append import AppendCall, SentFragment
from penstock.protocol.fragment import MOST, FragmentHeader, header_from_proto
from penstock.protocol.limits import (
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_EPISODES_PER_REPORT,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_NUMBER,
    SLOT_BYTES,
    SPAN_BYTES,
    check_id,
)
from penstock.protocol.messages import Credit, Report, Role
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.specification import RunSpecification
from penstock.rpc.gate import Context, Malformed
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint
from penstock.v1 import experience_pb2 as pb
from penstock.v1 import specification_pb2
from penstock.v1.experience_pb2_grpc import ExperienceServiceServicer

log = logging.getLogger(__name__)

# ---- The check of fragments.

CHECKED_ON_LOOP: Final = 16
ROWS_ON_LOOP: Final = 1024
"""More fragments, or more slots and spans in them, than this in one request are checked on a thread."""
REFRESH_INTERVAL_S: Final = 1.0
REFUSED_INTERVAL_S: Final = 0.05
"""Largest age of the specification by which a fragment is refused."""
NOT_WRITTEN: Final = Refusal(
    reason=Reason.NOT_READY,
    detail="the learner has not written the run specification yet",
    retry_after_ms=500,
)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The fragments before the first that breaks the contract, and the refusal of that one."""

    items: Sequence[AppendItem]
    refusal: Refusal | None


class Admission:
    """Checks fragments against the specification of the run.

    read_specification: returns the encoded specification, None before the learner wrote one. confirm: raises
    where the run is another incarnation than the one whose specification was read.
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
        """Forget the specification: the run is another incarnation."""
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


# ---- When callers that come before the run is there should retry.

LEAST_S: Final = 0.05
MOST_S: Final = 0.5
CALLS_PER_S: Final = 100.0


class RetryTimes:
    """Spreads the retries of callers that wait for the run: a few retry soon, many retry seldom.

    All together retry at most CALLS_PER_S times a second, unless each would wait for longer than MOST_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = -math.inf

    def after_ms(self) -> int:
        now_s = self._clock()
        due_s = max(now_s + LEAST_S, self._last_s + 1.0 / CALLS_PER_S)
        self._last_s = min(due_s, now_s + MOST_S)
        return round((self._last_s - now_s) * 1000)


# ---- The calls.


class ExperienceService(ExperienceServiceServicer):
    """Serves ExperienceService: sessions, fragments and reports."""

    def __init__(
        self,
        store: Store,
        admission: Admission,
        staging: StagingLimit,
        facts: ServerFacts,
        owners: SessionOwners,
        last_credit: LastCredit,
        changes: Changes,
    ) -> None:
        """changes: notes after each Append whether its session waits for credit."""
        self._store, self._admission, self._staging, self._owners = store, admission, staging, owners
        self._last_credit, self._changes = last_credit, changes
        self._retry_times = RetryTimes()
        self._appends: set[asyncio.Future[Appended]] = set()
        self.note_facts(facts)

    def note_facts(self, facts: ServerFacts) -> None:
        """Acknowledge from now on at the level that the server gives."""
        self._durability = pb.Durability.ValueType(facts.durability.value)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionReply:
        actor_id, role = read_opening(request)
        await self._owners.check_name(actor_id, context)
        if request.describe_only:
            return await self._describe()
        failpoint("session.opening")
        try:
            opened = await self._store.open_session(actor_id, role, caller_name())
        except StoreUnavailable as error:
            opened = redis_down(Reason.NOT_READY, error)
        else:
            if isinstance(opened, Refusal) and opened.reason is Reason.NOT_READY:
                opened = replace(opened, retry_after_ms=self._retry_times.after_ms())
        if isinstance(opened, Refusal):
            return pb.OpenSessionReply(refusal=counted(opened))
        self._last_credit.note(opened.session, opened.credit.begin_through)
        failpoint("session.opened", opened.session)
        who = {"session": opened.session, "actor": actor_id, "acts_as": role.label, "by": caller_name()}
        log.info("session opened", extra=who)
        return pb.OpenSessionReply(
            session=opened.session,
            specification=specification_pb2.RunSpecification.FromString(opened.specification),
            seed_salt=opened.seed_salt,
            leave=opened.credit.to_proto(),
        )

    async def _describe(self) -> pb.OpenSessionReply:
        try:
            encoded = await self._store.specification()
        except StoreUnavailable as error:
            return pb.OpenSessionReply(refusal=redis_down(Reason.NOT_READY, error).to_proto())
        if encoded is None:
            waits = replace(NOT_WRITTEN, retry_after_ms=self._retry_times.after_ms())
            return pb.OpenSessionReply(refusal=waits.to_proto())
        return pb.OpenSessionReply(specification=specification_pb2.RunSpecification.FromString(encoded))

    async def Append(  # type: ignore[override] # parsed by `penstock.protocol.append`
        self, request: AppendCall, context: Context
    ) -> pb.AppendReply:
        began = time.perf_counter()
        check_append(request)
        try:
            await self._owners.check(request.session, context)
            failpoint("append.received", request.acked_through + 1)
            admitted = await self._admission.admit(request.session, request.fragments)
            appended = await self._append(request, admitted)
        except StoreUnavailable as error:
            appended = _untaken(request, redis_down(Reason.FULL, error))
        except Refused as error:
            appended = _untaken(request, error.refusal)
        metrics.APPEND_SECONDS.observe(time.perf_counter() - began)
        self._last_credit.note(request.session, appended.credit.begin_through)
        self._changes.note_waiting(request.session, appended.waits)
        failpoint("append.answering", appended.acked_through)
        return pb.AppendReply(
            acked_through=appended.acked_through,
            durability=self._durability,
            refusal=counted(appended.refusal),
            leave=appended.credit.to_proto(),
        )

    async def _append(self, request: AppendCall, admitted: Admitted) -> Appended:
        if admitted.refusal is not None and not admitted.items:
            return _untaken(request, admitted.refusal)
        items, size = admitted.items, sum(len(item.payload) for item in admitted.items)
        self._staging.take(size)
        try:
            await self._store.open()
        except BaseException:
            self._staging.give_back(size)
            raise
        begun = self._store.begin_append(request.session, request.acked_through, items)
        self._appends.add(begun)
        begun.add_done_callback(partial(self._ended, items, size))
        appended = await self._store.outcome(begun)
        if admitted.refusal is None or appended.refusal is not None:
            return appended
        return replace(appended, refusal=admitted.refusal)

    def _ended(self, items: Sequence[AppendItem], size: int, begun: "asyncio.Future[Appended]") -> None:
        self._appends.discard(begun)
        self._staging.give_back(size)
        if begun.cancelled() or begun.exception() is not None:
            return
        appended, taken = begun.result(), len(items)
        if appended.refusal is not None or appended.appended < taken:
            taken = sum(item.header.sequence <= appended.acked_through for item in items)
            size = sum(len(item.payload) for item in items[taken - appended.appended : taken])
            metrics.FRAGMENTS_REPEATED.inc(taken - appended.appended)
        metrics.FRAGMENTS_APPENDED.inc(appended.appended)
        metrics.FRAGMENT_BYTES_APPENDED.inc(size)

    async def finish_appends(self) -> None:
        """Wait for the appends that have begun; their callers may be gone."""
        await asyncio.gather(*self._appends, return_exceptions=True)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionReply:
        check_number("session", request.session)
        await self._owners.check(request.session, context)
        await self._store.close_session(request.session)
        log.info("session closed", extra={"session": request.session, "by": caller_name()})
        return pb.CloseSessionReply()

    async def ReportEpisodes(
        self, request: pb.ReportEpisodesRequest, context: Context
    ) -> pb.ReportEpisodesReply:
        report = read_report(request)
        try:
            await self._owners.check(request.session, context)
            failpoint("report.sending", report.sequence)
            acked_through, refusal = await self._store.report(report)
            failpoint("report.stored", report.sequence)
        except StoreUnavailable as error:
            acked_through, refusal = 0, redis_down(Reason.FULL, error)
        return pb.ReportEpisodesReply(acked_through=acked_through, refusal=counted(refusal))


def _untaken(request: AppendCall, refusal: Refusal) -> Appended:
    """Return the reply to an append of which nothing was taken; `acked_through` is the actor's own."""
    return Appended(acked_through=request.acked_through, refusal=refusal, credit=Credit())


def read_opening(request: pb.OpenSessionRequest) -> tuple[str, Role]:
    """Return actor and role; raises Malformed that names the field."""
    try:
        return check_id("actor_id", request.actor_id), Role(request.role)
    except ValueError as error:
        text = (
            str(error)
            if "actor_id" in str(error)
            else f"role={request.role}: use ROLLOUT, SERVER or EVALUATION"
        )
        raise Malformed(text) from error


def check_append(request: AppendCall) -> None:
    """Raise Malformed for a request that is wrong outside its fragments."""
    check_number("session", request.session)
    if not 1 <= len(request.fragments) <= MAX_FRAGMENTS_PER_APPEND:
        raise Malformed(
            f"fragments: {len(request.fragments)} in one Append, send 1 to {MAX_FRAGMENTS_PER_APPEND}"
        )
    if request.acked_through > MAX_NUMBER:
        raise Malformed(
            f"acked_through={request.acked_through}: the broker never acknowledged that; at most 2^53"
        )


def read_report(request: pb.ReportEpisodesRequest) -> Report:
    """Raise Malformed that names the field."""
    check_number("session", request.session)
    check_number("sequence", request.sequence)
    if len(request.episodes) > MAX_EPISODES_PER_REPORT:
        raise Malformed(f"episodes: {len(request.episodes)} in one report, at most {MAX_EPISODES_PER_REPORT}")
    for index, episode in enumerate(request.episodes):
        # The sum of many must be finite too; NaN is in no order, so it is not below the bound either.
        if not abs(episode.episode_return) <= MOST:
            raise Malformed(
                f"episodes[{index}].episode_return={episode.episode_return}: send a finite number of at most "
                f"±{MOST:.3g}"
            )
    return Report.from_proto(request)
