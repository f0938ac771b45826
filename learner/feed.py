"""From the log to batches: reads ahead in its own thread, oldest first, by position.

Every entry is decided in order: dropped under a named reason, or made part of one batch. Staleness is
judged for the update that will consume the batch: the learner's count now plus the batches read ahead,
so reading ahead changes no verdict and a resumed learner decides as the first one did. Only payloads
that are used are fetched. The queue is bounded; a full one stops the reading. Nothing here is written:
a crash costs nothing, the next process reads the same entries.

In lock-step a batch is one round: everything stamped with it once every session of its roster has
appended, in order of actor id.
"""

import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from broker.learner_log import LearnerLog
from broker.state import LogEntry, Verdict
from learner.algorithm import Algorithm
from learner.batch import assemble, check_meaning
from learner.delivery import Delivery, reward_of
from learner.lease import LeaseKeeper
from learner.ledger import DIGEST_BYTES, Drop, Origin
from learner.probe import Quarantine
from penstock.runtime import metrics, tracing
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint
from penstock.wire import fragment as wire
from penstock.wire.header import FragmentHeader
from penstock.wire.schema import FragmentSchema
from penstock.wire.tensor import Array

_READ: Final = 256
_BLOCK_MS: Final = 200
_PUT_WAIT_S: Final = 0.2

log = logging.getLogger(__name__)

Loaded = tuple[FragmentHeader, Mapping[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStart:
    """Where a feed begins. position: last entry consumed. turn: updates made. round: next of lock-step."""

    position: int = 0
    turn: int = 0
    round: int = 0


class Feed:
    """`run` in a thread, `take` from the loop."""

    def __init__(
        self,
        learner_log: LearnerLog,
        lease: LeaseKeeper,
        algorithm: Algorithm,
        quarantine: Quarantine,
        *,
        run_name: str,
        schema: FragmentSchema,
        budget: int,
        device: torch.device,
        prefetch: int,
        start: FeedStart,
        stop: threading.Event,
        take_digests: bool = False,
        keep_fragments: bool = False,
    ) -> None:
        """take_digests: of every payload that is used, for the lineage. keep_fragments: for the recording."""
        self._log = learner_log
        self._lease = lease
        self._algorithm = algorithm
        self._quarantine = quarantine
        self._run_name = run_name
        self._schema = schema
        self._budget = budget
        self._device = device
        self._stop = stop
        self._queue: queue.Queue[Delivery] = queue.Queue(maxsize=prefetch)
        self._read = start.position
        self._delivered = start.position
        self._round = start.round
        self._turn = start.turn
        self._turn_lock = threading.Lock()
        self._pending: deque[LogEntry] = deque()
        self._dropped: dict[int, Drop] = {}
        self._undelivered: dict[int, LogEntry] = {}
        self._steps_delivered: int | None = None
        self._steps_read = 0
        self._loaded: dict[int, Loaded] = {}
        self._take_digests = take_digests
        self._digests: dict[int, bytes] = {}
        self._keep_fragments = keep_fragments
        self._fragments: dict[int, wire.Fragment] = {}

    taken: Final = 0
    """Of a recording; a log has none."""
    exhausted: Final = False
    """A log goes on."""

    # ---- the loop's side

    def take(self, timeout_s: float) -> Delivery | None:
        """The next delivery in order; None when there is none within `timeout_s`."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def skipped(self) -> None:
        """A batch made no update: the ones that follow have their turn one update earlier."""
        with self._turn_lock:
            self._turn -= 1

    # ---- the thread

    def run(self) -> None:
        """Read, decide, deliver until `stop`."""
        while not self._stop.is_set():
            failpoint("feed.waiting", self._read)
            for entry in self._lease.patiently(lambda: self._log.read(self._read, _READ, _BLOCK_MS)):
                self._note(entry)
            failpoint("feed.choosing", self._read)
            while (delivery := self._next()) is not None and self._put(delivery):
                pass

    def _put(self, delivery: Delivery) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(delivery, timeout=_PUT_WAIT_S)
            except queue.Full:
                continue
            return True
        return False

    def _note(self, entry: LogEntry) -> None:
        for number in range(self._read + 1, entry.number):
            self._add(LogEntry(number=number, header=None, steps_total=self._steps_read, size=0, round=0))
        self._add(entry)

    def _add(self, entry: LogEntry) -> None:
        self._read, self._steps_read = entry.number, entry.steps_total
        self._undelivered[entry.number] = entry
        if self._steps_delivered is None:
            self._steps_delivered = entry.steps_total - _charge(entry)
        if entry.header is None:
            self._drop_missing(entry.number)
        else:
            self._pending.append(entry)

    def _next(self) -> Delivery | None:
        chosen = self._choose_round() if self._algorithm.lock_step else self._choose()
        while chosen is not None and not self._load(chosen):
            chosen = self._choose_round() if self._algorithm.lock_step else self._choose()
        return None if chosen is None else self._deliver(chosen)

    # ---- which entries

    def _choose(self) -> list[LogEntry] | None:
        """Entries of the next batch; [] when all that is there was dropped; None: not enough yet."""
        kept: list[LogEntry] = []
        headers: list[FragmentHeader] = []
        for entry in list(self._pending):
            if not self._keep(entry):
                continue
            kept.append(entry)
            headers.append(_header(entry))
            if self._algorithm.take(headers):
                return kept
        if not kept:
            return [] if self._dropped else None
        # What was dropped in between is settled only together with what is kept: where both fill the
        # budget nobody has leave to send the rest of a batch, so a smaller one must do.
        return kept if self._steps_read - (self._steps_delivered or 0) >= self._budget else None

    def _choose_round(self) -> list[LogEntry] | None:
        if not self._lease.patiently(lambda: self._log.round_complete(self._round)):
            return None
        # The round is closed by now, so everything it holds is behind us or read here.
        while more := self._lease.patiently(lambda: self._log.read(self._read, _READ, 0)):
            for entry in more:
                self._note(entry)
        mine = [entry for entry in list(self._pending) if entry.round <= self._round and self._keep(entry)]
        return sorted(
            mine, key=lambda entry: (entry.actor_id, _header(entry).session, _header(entry).sequence)
        )

    def _keep(self, entry: LogEntry) -> bool:
        reason = self._verdict(entry)
        if reason is not None:
            self._drop(entry.number, reason)
            self._pending.remove(entry)
        return reason is None

    def _verdict(self, entry: LogEntry) -> Drop | None:
        header = _header(entry)
        if self._quarantine.holds(header.session):
            return Drop.QUARANTINED
        limit = self._algorithm.hard_staleness
        if limit is not None and abs(self._turn - header.oldest_update) > limit:
            return Drop.STALE
        return None

    def _drop(self, number: int, reason: Drop) -> None:
        self._dropped[number] = reason
        self._loaded.pop(number, None)
        self._digests.pop(number, None)
        self._fragments.pop(number, None)

    def _drop_missing(self, number: int) -> None:
        match self._lease.patiently(lambda: self._log.missing(number)):
            case Verdict.LOG_LOST:
                log.error("entry lost with Redis", extra={"number": number})
                self._drop(number, Drop.LOG_LOST)
            case Verdict.EPOCH_LOST:
                raise Fatal("another learner has taken over; this one ends without writing")
            case Verdict.TRIMMED:
                raise Fatal(f"log entry {number} was trimmed before it was consumed: a programming error")

    # ---- their content

    def _load(self, chosen: Sequence[LogEntry]) -> bool:
        """Fetch and check; False when something had to be dropped and the choice must be made again."""
        wanted = [entry for entry in chosen if entry.number not in self._loaded]
        payloads = self._log.fetch([entry.number for entry in wanted]) if wanted else []
        whole = True
        for entry, payload in zip(wanted, payloads, strict=True):
            if payload is None:
                self._drop_missing(entry.number)
            elif (loaded := self._open(entry, payload)) is not None:
                self._loaded[entry.number] = loaded
                continue
            self._pending.remove(entry)
            whole = False
        return whole

    def _open(self, entry: LogEntry, payload: bytes) -> Loaded | None:
        header = _header(entry)
        try:
            loaded = opened(header, payload, self._schema, self._run_name)
        except ValueError as error:
            words = {"number": entry.number, "why": str(error)}
            log.error("fragment dropped as invalid", extra=words)  # noqa: TRY400 - the text says it all
            self._drop(entry.number, Drop.INVALID)
            return None
        if self._take_digests:
            self._digests[entry.number] = hashlib.sha256(payload).digest()[:DIGEST_BYTES]
        if self._keep_fragments:
            self._fragments[entry.number] = wire.Fragment(header, payload)
        return loaded

    # ---- out

    def _deliver(self, chosen: Sequence[LogEntry]) -> Delivery:
        started = time.perf_counter()
        last = self._last(chosen)
        numbers = range(self._delivered + 1, last + 1)
        loaded = [self._loaded.pop(entry.number) for entry in chosen]
        headers = [header for header, _ in loaded]
        dropped = {number: self._dropped.pop(number) for number in sorted(self._dropped) if number <= last}
        delivery = Delivery(
            last=last,
            trained=tuple(entry.number for entry in chosen),
            dropped=dropped,
            steps=sum(int(arrays["valid"].sum()) for _, arrays in loaded),
            updates=tuple(header.oldest_update for header in headers),
            versions=tuple(header.oldest_version for header in headers),
            batch=assemble(loaded, self._device, [(e.number, e.size) for e in chosen]) if loaded else None,
            round=self._round if self._algorithm.lock_step else None,
            size=sum(self._undelivered[number].size for number in numbers),
            created_us=min((header.created_us for header in headers), default=0),
            assemble_s=time.perf_counter() - started,
            origins={number: origin for number in numbers if (origin := self._origin(number)) is not None},
            traces=_trace(chosen, time.perf_counter() - started) if tracing.is_on() else (),
            reward=sum(reward_of(arrays) for _, arrays in loaded),
            fragments=tuple(self._fragments.pop(e.number) for e in chosen) if self._keep_fragments else (),
        )
        self._forget(chosen, last)
        metrics.UPDATE_SECONDS.labels("assemble").observe(delivery.assemble_s)
        return delivery

    def _origin(self, number: int) -> Origin | None:
        header = self._undelivered[number].header
        if header is None:
            return None
        return Origin(header.session, header.sequence, self._digests.pop(number, b""))

    def _last(self, chosen: Sequence[LogEntry]) -> int:
        """Everything up to here is decided: the batch's newest entry, and drops that follow it directly."""
        last = max((entry.number for entry in chosen), default=self._delivered)
        while last + 1 in self._dropped:
            last += 1
        return last

    def _forget(self, chosen: Sequence[LogEntry], last: int) -> None:
        for entry in chosen:
            self._pending.remove(entry)
        for number in range(self._delivered + 1, last + 1):
            self._steps_delivered = self._undelivered.pop(number).steps_total
        self._delivered = last
        self._round += 1
        if chosen:
            with self._turn_lock:
                self._turn += 1


def opened(header: FragmentHeader, payload: bytes, schema: FragmentSchema, run_name: str) -> Loaded:
    """A fragment that can be trained on; raises ValueError that says why it cannot."""
    fragment = wire.Fragment(header, payload)
    wire.check(fragment, schema, run_name)
    arrays = fragment.arrays()
    check_meaning(header, arrays)
    return header, arrays


def _trace(chosen: Sequence[LogEntry], took_s: float) -> tuple[str, ...]:
    """A span of each traced fragment, for the batch that it is part of now."""
    spans = (
        tracing.record("learner.batch", took_s, header=_header(entry).traceparent, number=entry.number)
        for entry in chosen
    )
    return tuple(span for span in spans if span)


def _header(entry: LogEntry) -> FragmentHeader:
    assert entry.header is not None  # entries without one never become pending
    return entry.header


def _charge(entry: LogEntry) -> int:
    return 0 if entry.header is None else entry.header.charge
