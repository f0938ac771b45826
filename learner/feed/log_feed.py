"""From the log to batches, read ahead in a thread, oldest entry first.

Each entry is either dropped under a named reason or made part of one batch, in order. Staleness is judged for
the update that will consume the batch: the learner's count plus the batches read ahead. So reading ahead
changes no verdict, and a resumed learner decides as the first one did. The feed writes nothing. In lock-step
a batch is one round: all entries of that round in order of actor ids, once every session of its roster has
appended.

    read headers → judge each → fetch and check the chosen payloads → assemble → queue of the learner's loop
"""

import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, Protocol, Self, TypeVar

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import LogEntry, MissingReason
from penstock.config.settings import Settings
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.batch import (
    Batch,
    Loaded,
    Upload,
    assemble,
    check_meaning,
    nothing,
    reward_of,
)
from penstock.learner.feed.recording import FrameEntry
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import DIGEST_BYTES, Drop, Origin
from penstock.protocol import fragment as wire
from penstock.protocol.fragment import FragmentHeader
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from penstock.learner.learner import Learner
    from penstock.learner.model import Model

# ---- What the feed gives to the loop: consecutive entries of the log, each in the batch or dropped.


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBatch:
    """The entries up to `last`, each trained or dropped.

    trained: numbers of the entries in `batch`, in its order; with several ranks `batch` has a part of them.
    dropped: number → reason. steps: valid ones of the batch. updates, versions: oldest of each fragment.
    batch: None when everything was dropped. round: of lock-step. size: bytes of the entries in the log.
    created_us: oldest creation time, 0 without a fragment. assemble_s: seconds of assembly.
    origins: number → sender, of trained and dropped. actors: session → actor id, of the trained; a recording
    has none. reward: sum over the batch's steps. fragments: of the batch as they were received, where the
    learner records. recorded: batches of a recording up to this one; 0 from the log. event: of a recording,
    in place of a batch. flush: number of the operator's command that took this batch; 0: none.
    """

    last: int = 0
    trained: tuple[int, ...] = ()
    dropped: Mapping[int, Drop] = field(default_factory=dict)
    steps: int
    updates: tuple[int, ...]
    versions: tuple[int, ...] = ()
    batch: Batch | None
    round: int | None
    size: int = 0
    created_us: int
    assemble_s: float
    origins: Mapping[int, Origin] = field(default_factory=dict)
    actors: Mapping[int, str] = field(default_factory=dict)
    reward: float = 0.0
    fragments: tuple[wire.Fragment, ...] = ()
    recorded: int = 0
    event: FrameEntry | None = None
    flush: int = 0

    def as_dropped(self, reason: Drop) -> Self:
        """Return the same entries with all of them dropped."""
        dropped = {**self.dropped, **dict.fromkeys(self.trained, reason)}
        return replace(
            self, trained=(), dropped=dropped, actors={}, steps=0, batch=None, fragments=(), reward=0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """A command to train the pending entries up to `through` as one batch of at least so many steps."""

    number: int
    least: int
    through: int


class Pending:
    """Entries that are read and not yet trained or dropped, oldest first.

    kept: entries of the next batch. charge: the sum of their charges.
    judge: returns whether to keep an entry; drops it otherwise.
    circumstances: what verdicts depend on; where it has changed, `choose` judges the kept entries again.
    """

    def __init__(self, judge: Callable[[LogEntry], bool], circumstances: Callable[[], object]) -> None:
        self._judge = judge
        self._circumstances = circumstances
        self._judged_under: object = None
        self._unseen: deque[LogEntry] = deque()
        self.kept: list[LogEntry] = []
        self.charge = 0

    def add(self, entry: LogEntry) -> None:
        self._unseen.append(entry)

    def choose(self, makes_batch: Callable[[int, int], bool], through: int | None = None) -> bool:
        """Keep entries until they make a batch; returns whether they do.

        makes_batch: given the count of the kept ones and the sum of their charges. through: last entry that
        may be chosen; None: any.
        """
        self._judge_again()
        if through is not None:
            self._put_back(through)
        while not self._is_enough(makes_batch) and self._unseen:
            if through is not None and self._unseen[0].number > through:
                break
            entry = self._unseen.popleft()
            if self._judge(entry):
                self._keep(entry)
        return self._is_enough(makes_batch)

    def choose_round(self, number: int) -> list[LogEntry]:
        """Return the kept entries of lock-step rounds up to `number`, in order of the log."""
        self._judge_again()
        later: deque[LogEntry] = deque()
        for entry in self._unseen:
            if entry.round > number:
                later.append(entry)
            elif self._judge(entry):
                self._keep(entry)
        self._unseen = later
        return self.kept

    def discard(self, numbers: Collection[int]) -> None:
        kept, self.kept, self.charge = self.kept, [], 0
        for entry in kept:
            if entry.number not in numbers:
                self._keep(entry)

    def take(self) -> None:
        self.kept, self.charge = [], 0

    def _put_back(self, through: int) -> None:
        """Have the kept entries after `through` judged later."""
        behind = [entry for entry in self.kept if entry.number > through]
        self.discard({entry.number for entry in behind})
        self._unseen.extendleft(reversed(behind))

    def _is_enough(self, makes_batch: Callable[[int, int], bool]) -> bool:
        return bool(self.kept) and makes_batch(len(self.kept), self.charge)

    def _judge_again(self) -> None:
        now = self._circumstances()
        if now != self._judged_under:
            self._judged_under = now
            self.discard({entry.number for entry in self.kept if not self._judge(entry)})

    def _keep(self, entry: LogEntry) -> None:
        assert entry.header is not None, "entries without a header never become pending"
        self.kept.append(entry)
        self.charge += entry.header.charge


_READ: Final = 256
_READ_AGAIN: Final = 64
_BLOCK_MS: Final = 200
_PUT_WAIT_S: Final = 0.2

log = logging.getLogger(__name__)

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """A bounded queue from a thread that reads ahead to the thread that consumes."""

    def __init__(self, most: int, stop: threading.Event) -> None:
        self._items: queue.Queue[T] = queue.Queue(most)
        self._stop = stop

    def put(self, item: T) -> bool:
        """Add an item once there is room; returns False if `stop` is set first."""
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=_PUT_WAIT_S)
            except queue.Full:
                continue
            return True
        return False

    def take(self, timeout_s: float) -> T | None:
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None


class LogFeed:
    """The batches of a learner with actors, from the ledger's position on, in the order of training.

    `run` fills a bounded queue in a thread, `take` empties it.
    """

    def __init__(self, learner: "Learner", payloads: "Payloads") -> None:
        self._log, self._lease, self._algorithm = learner.learner_log, learner.lease, learner.algorithm
        self._quarantine, self._budget = learner.model.quarantine, learner.model.pacing.budget
        self._payloads, self._stop = payloads, learner.stop
        self._ahead = ReadAhead[LogBatch](learner.settings.learner.prefetch_batches, self._stop)
        self._read = self._delivered = learner.ledger.position
        self._round, self._restored_from = learner.ledger.round, learner.ledger.restored_from
        self._updates = self._algorithm.updates
        self._updates_lock = threading.Lock()
        self._pending = Pending(self._admits, self._circumstances)
        self._undelivered: dict[int, _Undelivered] = {}
        self._steps_delivered: int | None = None
        self._steps_read = 0
        self._flush: Flush | None = None
        self._flushing = 0
        self._too_few: tuple[int, int] = (0, 0)

    # ---- the loop's side

    def take(self, timeout_s: float) -> LogBatch | None:
        """Return the next batch, None after `timeout_s`."""
        log_batch = self._ahead.take(timeout_s)
        if log_batch is not None and log_batch.batch is not None:
            log_batch.batch.arrive()
        return log_batch

    def drop_before(self, version: int) -> None:
        """Drop experience that was begun with an older version, unless it was taken, as `restored`."""
        self._restored_from = version

    def flush(self, flush: Flush) -> None:
        """Take the pending entries up to a given one as a batch, after full ones before it; see `too_few`."""
        self._flush = flush

    def too_few(self, number: int) -> int | None:
        """Return the pending steps where they are fewer than a flush requires; None: it can be taken."""
        command, pending = self._too_few
        return pending if command == number else None

    def skipped(self) -> None:
        """Note that the last batch made no update: later ones are consumed one update earlier."""
        with self._updates_lock:
            self._updates -= 1

    # ---- the thread

    def run(self) -> None:
        while not self._stop.is_set():
            failpoint("feed.waiting", self._read)
            for entry in self._lease.patiently(lambda: self._log.read(self._read, _READ, _BLOCK_MS)):
                self._note(entry)
            failpoint("feed.choosing", self._read)
            while (log_batch := self._next()) is not None and self._ahead.put(log_batch):
                pass

    def _note(self, entry: LogEntry) -> None:
        for number in range(self._read + 1, entry.number):
            self._add(LogEntry(number=number, header=None, steps_total=self._steps_read, size=0, round=0))
        self._add(entry)

    def _add(self, entry: LogEntry) -> None:
        self._read, self._steps_read = entry.number, entry.steps_total
        self._undelivered[entry.number] = _Undelivered(entry)
        if self._steps_delivered is None:
            charge = 0 if entry.header is None else entry.header.charge
            self._steps_delivered = entry.steps_total - charge
        if entry.header is None:
            self._drop_missing(entry.number)
        else:
            self._pending.add(entry)

    def _next(self) -> LogBatch | None:
        chosen = self._choose_round() if self._algorithm.lock_step else self._choose()
        while chosen is not None and not self._load(chosen):
            self._flushing = 0
            chosen = self._choose_round() if self._algorithm.lock_step else self._choose()
        return None if chosen is None else self._deliver(chosen)

    # ---- the choice of entries

    def _choose(self) -> list[LogEntry] | None:
        """Return the entries of the next batch; [] when all of them were dropped; None: not enough yet."""
        flush = self._flush
        if flush is not None and self._read >= flush.through:
            return self._choose_flush(flush)
        if self._pending.choose(self._algorithm.makes_batch):
            return self._pending.kept
        if not self._pending.kept:
            return [] if self._has_dropped() else None
        # Dropped entries are settled only together with kept ones. Where both fill the budget no session has
        # credit to send the rest of a batch, so a smaller one is trained.
        is_filled = self._steps_read - (self._steps_delivered or 0) >= self._budget
        return self._pending.kept if is_filled else None

    def _choose_flush(self, flush: Flush) -> list[LogEntry] | None:
        """Choose up to the flush's last entry: full batches first, then the rest, if it is enough."""
        if self._pending.choose(self._algorithm.makes_batch, flush.through):
            return self._pending.kept
        if self._pending.kept and self._pending.charge >= flush.least:
            self._flushing = flush.number
            return self._pending.kept
        if not self._pending.kept and self._has_dropped():
            return []
        self._flush, self._too_few = None, (flush.number, self._pending.charge)
        return self._choose()

    def _choose_round(self) -> list[LogEntry] | None:
        if not self._lease.patiently(lambda: self._log.round_complete(self._round)):
            return None
        # The round is closed by now: all of its entries were read before or are read here.
        while more := self._lease.patiently(lambda: self._log.read(self._read, _READ, 0)):
            for entry in more:
                self._note(entry)
        mine = self._pending.choose_round(self._round)
        return sorted(
            mine, key=lambda entry: (entry.actor_id, _header(entry).session, _header(entry).sequence)
        )

    def _circumstances(self) -> tuple[int, frozenset[int], int]:
        return self._updates, self._quarantine.sessions, self._restored_from

    def _admits(self, entry: LogEntry) -> bool:
        reason = self._verdict(entry)
        if reason is not None:
            self._drop(entry.number, reason)
        return reason is None

    def _verdict(self, entry: LogEntry) -> Drop | None:
        header = _header(entry)
        if self._quarantine.holds(header.session):
            return Drop.QUARANTINED
        if header.oldest_version < self._restored_from:
            return Drop.RESTORED
        stale_after = self._algorithm.stale_after
        if stale_after is not None and abs(self._updates - header.oldest_update) > stale_after:
            return Drop.STALE
        return None

    def _drop(self, number: int, reason: Drop) -> None:
        one = self._undelivered[number]
        one.dropped, one.found = reason, None

    def _has_dropped(self) -> bool:
        return any(one.dropped is not None for one in self._undelivered.values())

    def _drop_missing(self, number: int) -> None:
        match self._lease.patiently(lambda: self._log.missing(number)):
            case MissingReason.LOG_LOST:
                log.error("entry lost with Redis", extra={"number": number})
                self._drop(number, Drop.LOG_LOST)
            case MissingReason.EPOCH_LOST:
                raise Fatal("another learner has taken over; this one ends without writing")
            case MissingReason.TRIMMED:
                raise Fatal(f"log entry {number} was trimmed before it was consumed: a programming error")

    # ---- their payloads

    def _load(self, chosen: Sequence[LogEntry]) -> bool:
        """Fetch and check the payloads; False if one had to be dropped, and the choice must be repeated."""
        wanted = [entry for entry in chosen if self._undelivered[entry.number].found is None]
        bad = set()
        for entry, found in zip(wanted, self._payloads.check(wanted) if wanted else (), strict=True):
            if found.state is State.GOOD:
                self._undelivered[entry.number].found = found
                continue
            if found.state is State.MISSING:
                self._drop_missing(entry.number)
            else:
                self._drop(entry.number, Drop.INVALID)
                why = f"log entry {entry.number} is invalid"
                self._quarantine.convict(_header(entry).session, entry.actor_id, why)
                self._lease.wake()
            bad.add(entry.number)
        if bad:
            self._pending.discard(bad)
        return not bad

    # ---- out

    def _deliver(self, chosen: Sequence[LogEntry]) -> LogBatch:
        started = time.perf_counter()
        last = self._last(chosen)
        batch = self._payloads.batch(chosen) if chosen else None
        entries = [self._undelivered.pop(number) for number in range(self._delivered + 1, last + 1)]
        by_number = {one.entry.number: one for one in entries}
        found = [one for entry in chosen if (one := by_number[entry.number].found) is not None]
        headers = [_header(entry) for entry in chosen]
        log_batch = LogBatch(
            last=last,
            trained=tuple(entry.number for entry in chosen),
            dropped={one.entry.number: one.dropped for one in entries if one.dropped is not None},
            steps=sum(one.steps for one in found),
            updates=tuple(header.oldest_update for header in headers),
            versions=tuple(header.oldest_version for header in headers),
            batch=batch,
            round=self._round if self._algorithm.lock_step else None,
            size=sum(one.entry.held_bytes for one in entries),
            created_us=min((header.created_us for header in headers), default=0),
            assemble_s=time.perf_counter() - started,
            origins={one.entry.number: origin for one in entries if (origin := one.origin()) is not None},
            actors={_header(entry).session: entry.actor_id for entry in chosen},
            reward=sum(one.reward for one in found),
            fragments=tuple(one.fragment for one in found if one.fragment is not None),
            flush=self._flushing,
        )
        self._pending.take()
        if entries:
            self._steps_delivered = entries[-1].entry.steps_total
        self._delivered = last
        self._round += 1
        if chosen:
            with self._updates_lock:
                self._updates += 1
        if self._flushing:
            self._flush, self._flushing = None, 0
        metrics.UPDATE_SECONDS.labels("assemble").observe(log_batch.assemble_s)
        return log_batch

    def _last(self, chosen: Sequence[LogEntry]) -> int:
        """Return the newest entry of the batch, or the last of the dropped ones that follow it directly."""
        last = max((entry.number for entry in chosen), default=self._delivered)
        while (following := self._undelivered.get(last + 1)) is not None and following.dropped is not None:
            last += 1
        return last


@dataclass(slots=True)
class _Undelivered:
    """An entry that was read. dropped: the reason, if it was. found: its payload, once it was checked."""

    entry: LogEntry
    dropped: Drop | None = None
    found: "Found | None" = None

    def origin(self) -> Origin | None:
        header, digest = self.entry.header, b"" if self.found is None else self.found.digest
        return None if header is None else Origin(header.session, header.sequence, digest)


def _header(entry: LogEntry) -> FragmentHeader:
    assert entry.header is not None, "entries without a header never become pending"
    return entry.header


# ---- The payloads of the chosen entries: fetched, checked, made into a batch.
#
# With several ranks each does so for its own entries (`penstock.learner.ranks.roles`).


class State(IntEnum):
    """The state of a payload."""

    GOOD = 1
    MISSING = 2
    INVALID = 3


@dataclass(frozen=True, slots=True)
class Found:
    """The result of the check of a payload.

    steps: valid ones of a good payload. reward: sum over these. digest: first DIGEST_BYTES of its SHA-256, if
    that is taken. fragment: payload and header, if this process read it and the learner records.
    """

    state: State
    steps: int = 0
    reward: float = 0.0
    digest: bytes = b""
    fragment: wire.Fragment | None = None


class Payloads(Protocol):
    """Where the feed's thread gets payloads from."""

    def check(self, entries: Sequence[LogEntry]) -> list[Found]: ...

    def batch(self, entries: Sequence[LogEntry]) -> Batch:
        """Return this rank's batch of good entries, in this order; other payloads are forgotten."""
        ...


class OwnPayloads:
    """`Payloads` that this process fetches, and puts on the model's device."""

    def __init__(self, learner_log: LearnerLog, settings: Settings, model: "Model") -> None:
        self._log, self._run_name = learner_log, settings.run
        self._schema, self._ranges = model.specification.schema, model.ranges
        self._upload = Upload(model.device)
        self._take_digests = settings.actor.ack_journal is not None
        self._keep_fragments = settings.learner.record is not None
        self._loaded: dict[int, Loaded] = {}

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        payloads = self._fetch(entries) if entries else []
        return [
            Found(State.MISSING) if payload is None else self._open(entry, payload)
            for entry, payload in zip(entries, payloads, strict=True)
        ]

    def batch(self, entries: Sequence[LogEntry]) -> Batch:
        """Assemble the entries; the batch of no entries has no columns.

        Payloads that were not checked here are fetched. Raises Fatal where one was good and is not now.
        """
        lacking = [entry for entry in entries if entry.number not in self._loaded]
        for entry, found in zip(lacking, self.check(lacking), strict=True):
            if found.state is not State.GOOD:
                raise Fatal(f"log entry {entry.number} was good and is {found.state.name.lower()} now")
        loaded = [self._loaded[entry.number] for entry in entries] or [nothing(self._schema)]
        places = [(entry.number, entry.size) for entry in entries] or None
        self._loaded.clear()
        return self._upload.stage(partial(assemble, loaded, self._upload.device, places))

    def _fetch(self, entries: Sequence[LogEntry]) -> Sequence[bytes | None]:
        return self._log.fetch([entry.number for entry in entries], [entry.size for entry in entries])

    def _open(self, entry: LogEntry, payload: bytes) -> Found:
        header = entry.header
        assert header is not None, "an entry without a header is never chosen"
        try:
            loaded = self._checked(header, payload)
        except ValueError as error:
            words = {"number": entry.number, "why": str(error)}
            log.error("fragment dropped as invalid", extra=words)  # noqa: TRY400 - the text is enough
            return Found(State.INVALID)
        self._loaded[entry.number] = loaded
        arrays = loaded[1]
        return Found(
            State.GOOD,
            steps=int(arrays["valid"].sum()),
            reward=reward_of(arrays),
            digest=hashlib.sha256(payload).digest()[:DIGEST_BYTES] if self._take_digests else b"",
            fragment=wire.Fragment(header, payload) if self._keep_fragments else None,
        )

    def _checked(self, header: FragmentHeader, payload: bytes) -> Loaded:
        fragment = wire.Fragment(header, payload)
        wire.check(fragment, self._schema, self._run_name)
        return header, check_meaning(header, fragment.arrays(), self._ranges)

    # ---- entries that an algorithm retains, read again by a learner that resumes

    def reload(self, lease: LeaseKeeper, algorithm: Algorithm, position: int) -> None:
        """Reload the entries that an algorithm retains, from `retain_from` up to `position`.

        Raises ValueError where an entry has changed since it was first read.
        """
        first = algorithm.retain_from()
        if first is None:
            return
        after = first - 1
        while after < position:
            failpoint("recall.reading", after)
            found = lease.patiently(lambda: self._log.read(after, _READ_AGAIN, 0))  # noqa: B023 - called before the next turn
            entries = [entry for entry in found if entry.number <= position]
            if not entries:
                break
            after = entries[-1].number
            self._reload_part(algorithm, entries)
        lost = algorithm.end_reload()
        words = {"first": first, "position": position, "lost": lost}
        if lost:
            log.error("replay comes back smaller: the log does not hold all of it any more", extra=words)
        else:
            log.info("replay was read again", extra=words)

    def _reload_part(self, algorithm: Algorithm, entries: Sequence[LogEntry]) -> None:
        loaded, places = [], []
        for entry, payload in zip(entries, self._fetch(entries), strict=True):
            if entry.header is None or payload is None:
                continue
            try:
                loaded.append(self._checked(entry.header, payload))
            except ValueError:
                continue  # It was booked `invalid` when it was first read, so it is not in replay.
            places.append((entry.number, entry.size))
        if loaded:
            algorithm.reload(assemble(loaded, self._upload.device, places))
