"""What the learner reads of the run in Redis: entries and payloads by position, reports, counters.

Nothing is written. A Redis that does not answer is waited for, then `Fatal`
(`penstock.broker.log.learner_calls`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from penstock.broker.log import keys, replies
from penstock.broker.log.connection import REPLY_TIMEOUT_S
from penstock.broker.log.guard import READ_BYTES
from penstock.broker.log.learner_calls import LearnerCalls
from penstock.broker.log.learner_records import LogEntry, MissingReason, ReportEntry, Residue
from penstock.broker.log.log_memory import LogMemory
from penstock.broker.log.store_records import Status
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.refusal import Reason, Refused

_MAX_BLOCK_MS: Final = int(REPLY_TIMEOUT_S * 1000 / 2)
_FETCH_SLICE: Final = 64
_WALK_SLICE: Final = 1000


class LogReader:
    """Reads the log; thread-safe. What it has read is noted in the memory that it is given."""

    def __init__(self, calls: LearnerCalls, memory: LogMemory) -> None:
        self._calls, self._memory = calls, memory

    def read(self, after: int, count: int, block_ms: int) -> list[LogEntry]:
        """Return entries with number > `after` in order, at most `count`.

        Waits up to `block_ms` (0: not at all).
        """
        wait = min(block_ms, _MAX_BLOCK_MS) or None
        found: Any = self._calls.patient(
            lambda: self._calls.client.xread({keys.LOG: keys.entry_id(after)}, count=count, block=wait)
        )
        entries = [replies.log_entry(*entry) for entry in found[0][1]] if found else []
        self._memory.saw(entries)
        return entries

    def entries(self, numbers: Sequence[int]) -> list[LogEntry]:
        """Return those of the named entries that are in the log, in order of number.

        A reader uses it that is told which entries to read, such as a rank.
        """
        if not numbers:
            return []
        first, last = keys.entry_id(min(numbers)), keys.entry_id(max(numbers))
        found: Any = self._calls.patient(lambda: self._calls.client.xrange(keys.LOG, min=first, max=last))
        wanted = set(numbers)
        entries = (replies.log_entry(*entry) for entry in found)
        return [entry for entry in entries if entry.number in wanted]

    def fetch(self, numbers: Sequence[int], sizes: Sequence[int] = ()) -> list[bytes | None]:
        """Return the payloads of entries; None where there is none (`missing` says why).

        Redis holds a reply until it is read, so no reply has more than READ_BYTES, a single payload apart.

        Args:
            numbers: of the entries.
            sizes: bytes of their payloads; without them each may have as many as a message.
        """
        payloads: list[bytes | None] = []
        for some in _slices(numbers, sizes or [MAX_MESSAGE_BYTES] * len(numbers)):
            names = map(keys.payload, some)
            payloads += self._calls.patient(partial(self._calls.client.execute_command, "MGET", *names))
        return payloads

    def missing(self, number: int) -> MissingReason:
        """Return why entry `number` or its payload is missing.

        Raises Refused(NOT_READY) while the log is closed.
        """
        try:
            reply = self._calls.fenced("missing", number)
        except Refused as refused:
            if refused.refusal.reason is Reason.FENCED:
                return MissingReason.EPOCH_LOST
            raise
        return MissingReason.TRIMMED if reply[0] == b"TRIMMED" else MissingReason.LOG_LOST

    def read_reports(self, after: int, count: int) -> list[ReportEntry]:
        """Return reports with number > `after` in order.

        The oldest are dropped when they are not read for long.
        """
        found: Any = self._calls.patient(
            lambda: self._calls.client.xrange(keys.REPORTS, min=f"({keys.entry_id(after)}", count=count)
        )
        reports = [replies.report_entry(*entry) for entry in found]
        if reports:
            self._memory.raise_to(reports=reports[-1].number)
        return reports

    def resident(self, after: int) -> int:
        """Return the number of entries behind `after`, by walking the log."""
        return self.residue(after).entries

    def residue(self, after: int) -> Residue:
        """Return what lies behind `after`, by walking the log; a number that is missing there was lost."""
        total, last = 0, after
        while True:
            start = f"({keys.entry_id(last)}"
            found: Any = self._calls.patient(
                partial(self._calls.client.xrange, keys.LOG, min=start, count=_WALK_SLICE)
            )
            if not found:
                return Residue(entries=total, lost=last - after - total)
            total += sum(values[b"h"] != b"" for _, values in found)
            last = int(found[-1][0].partition(b"-")[0])

    def fetched_versions(self) -> int:
        """Return the number of versions, of more than one chunk of weights, that actors are fetching."""
        return int(self._calls.patient(lambda: self._calls.client.execute_command("HLEN", keys.FETCHES)))

    def acked(self) -> int:
        """Return the number of fragments acknowledged over the run, counted by the append script."""
        return self._counter("acked")

    def log_lost(self) -> int:
        """Return the number of acknowledged fragments that actors knew and Redis lost.

        The append script counts them.
        """
        return self._counter("log_lost")

    def _counter(self, name: str) -> int:
        value = self._calls.patient(lambda: self._calls.client.execute_command("HGET", keys.STATE, name))
        return int(value or 0)

    def status(self) -> Status:
        """Return the run at one moment, its sessions included."""
        return replies.status(self._calls.run("status"))


def _slices(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers in order, so many at a time as one reply may hold."""
    some: list[int] = []
    total = 0
    for number, size in zip(numbers, sizes, strict=True):
        if some and (total + size > READ_BYTES or len(some) == _FETCH_SLICE):
            yield some
            some, total = [], 0
        some.append(number)
        total += size
    if some:
        yield some
