"""What rank 0 has the other ranks of its learner do.

Rank 0 holds the lease, reads the log, publishes and writes checkpoints as a single rank does. All others
get its state at the start, are told of every update before it begins, and end when it ends.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch
from safetensors.torch import save

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import LogEntry
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Update
from penstock.learner.batch import Staged
from penstock.learner.feed.payloads import Found, Payloads, State
from penstock.learner.ledger import DIGEST_BYTES
from penstock.learner.ranks.rendezvous import Meeting, RankConnection, divide
from penstock.runtime.exit import Fatal

log = logging.getLogger(__name__)

_PUT_WAIT_S: Final = 0.2
_COLUMNS: Final = 5
"""State, steps, bits of the reward, digest as a number, length of the digest."""


class SharedPayloads:
    """Implements `Payloads` on rank 0: it assigns entries, and each rank fetches its own."""

    def __init__(self, own: Payloads, connection: RankConnection) -> None:
        self._own = own
        self._connection = connection

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        """Let each rank check a part of the entries, of which it keeps the payloads; return all results."""
        mine = entries[self._divided("check", entries)[0]]
        numbers = torch.zeros((len(entries), _COLUMNS), dtype=torch.int64)
        for row, found in zip(numbers, self._own.check(mine), strict=False):
            row.copy_(_numbers(found))
        return [_found(*row) for row in self._connection.add_up(numbers).tolist()]

    def batch(self, entries: Sequence[LogEntry]) -> Staged:
        """Assign the entries, and return rank 0's own part."""
        return self._own.batch(entries[self._divided("batch", entries)[0]])

    def _divided(self, what: str, entries: Sequence[LogEntry]) -> list[slice]:
        """Send every rank its part: the index of its first entry among all, and its numbers."""
        charges = [0 if entry.header is None else entry.header.charge for entry in entries]
        parts = divide(charges, self._connection.size)
        numbers = [[entry.number for entry in entries[part]] for part in parts]
        first = [part.start for part in parts]
        self._connection.say({"what": what, "of": len(entries), "first": first, "numbers": numbers})
        return parts


class FollowingFeed:
    """The feed of any other rank: call `run` in a thread, `take` from the main one."""

    def __init__(
        self,
        learner_log: LearnerLog,
        own: Payloads,
        connection: RankConnection,
        *,
        prefetch: int,
        stop: threading.Event,
    ) -> None:
        self._log = learner_log
        self._own = own
        self._connection = connection
        self._stop = stop
        self._queue: queue.Queue[Staged] = queue.Queue(maxsize=prefetch)

    def take(self, timeout_s: float) -> Staged | None:
        """Return this rank's part of the next batch; None when there is none within `timeout_s`."""
        try:
            staged = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        staged.arrive()
        return staged

    def run(self) -> None:
        """Execute rank 0's requests until `stop`."""
        while not self._stop.is_set():
            words, _ = self._connection.hear()
            numbers = [int(number) for number in words["numbers"][self._connection.rank]]
            if words["what"] == "check":
                self._check(numbers, int(words["first"][self._connection.rank]), int(words["of"]))
            else:
                self._put(self._own.batch(self._all(numbers)))

    def _check(self, numbers: list[int], first: int, of: int) -> None:
        """Check entries; an entry that is no longer there counts as missing, as its payload would."""
        entries = self._entries(numbers)
        found = dict(zip([entry.number for entry in entries], self._own.check(entries), strict=True))
        answer = torch.zeros((of, _COLUMNS), dtype=torch.int64)
        for row, number in enumerate(numbers, first):
            answer[row] = _numbers(found.get(number, Found(State.MISSING)))
        self._connection.add_up(answer)

    def _all(self, numbers: list[int]) -> list[LogEntry]:
        entries = self._entries(numbers)
        if len(entries) != len(numbers):
            raise Fatal(f"of log entries {numbers[0]}..{numbers[-1]} some were good and are gone now")
        return entries

    def _entries(self, numbers: list[int]) -> list[LogEntry]:
        """Return the entries in the order of `numbers`."""
        by_number = {entry.number: entry for entry in self._log.entries(numbers) if entry.header is not None}
        return [by_number[number] for number in numbers if number in by_number]

    def _put(self, staged: Staged) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(staged, timeout=_PUT_WAIT_S)
            except queue.Full:
                continue
            return


def _numbers(found: Found) -> torch.Tensor:
    digest = int.from_bytes(found.digest, "little", signed=True)
    reward = int(torch.tensor(found.reward, dtype=torch.float64).view(torch.int64))
    return torch.tensor([found.state, found.steps, reward, digest, len(found.digest)])


def _found(state: int, steps: int, reward: int, digest: int, digest_bytes: int) -> Found:
    return Found(
        State(state),
        steps=steps,
        reward=float(torch.tensor(reward).view(torch.float64)),
        digest=digest.to_bytes(DIGEST_BYTES, "little", signed=True)[:digest_bytes],
    )


RESTORED: Final = Update(applied=True)
"""What ranks compare after a restore, beside their weights."""


class Ranks:
    """The other ranks of this learner, called from rank 0; here there are none, and nothing is to be done."""

    def start(self, algorithm: Algorithm) -> None:
        """Send the current state of `algorithm` to all ranks."""

    def payloads(self, own: Payloads) -> Payloads:
        """Return the source from which the feed takes payloads; `own`: that of this rank alone."""
        return own

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Announce an update before it begins; progress: as of `update`. is_flushed: see `Batch`."""

    def skip(self) -> None:
        """Drop the batch that every rank has its part of."""

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Have all ranks restore what `algorithm` has; raises Fatal unless all of them then agree."""

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Compare the ranks after an update; raises Fatal when they have drifted apart."""

    def end(self, *, failed: bool) -> None:
        """Let the other ranks end, with a failure or without; ranks that are gone already are skipped."""


class LeadingRank(Ranks):
    """Rank 0 of several. drain: called, with the reason, when another rank was asked to end."""

    def __init__(self, meeting: Meeting, drain: Callable[[str], None]) -> None:
        self._meeting = meeting
        self._drain = drain

    def start(self, algorithm: Algorithm) -> None:
        """See `Ranks`."""
        state = algorithm.state()
        self._meeting.turns.say({"what": "state", "numbers": state.numbers}, save(state.tensors))

    def payloads(self, own: Payloads) -> Payloads:
        """See `Ranks`."""
        return SharedPayloads(own, self._meeting.feed)

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """See `Ranks`."""
        self._meeting.turns.say({"what": "update", "progress": progress, "is_flushed": is_flushed})

    def skip(self) -> None:
        """See `Ranks`."""
        self._meeting.turns.say({"what": "skip"})

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """See `Ranks`."""
        self._meeting.turns.say({"what": "restore", "numbers": state.numbers}, save(state.tensors))
        self.agree(algorithm, RESTORED)

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """See `Ranks`."""
        if self._meeting.agree(algorithm, update, draining=False):
            self._drain("another rank was asked to end")

    def end(self, *, failed: bool) -> None:
        """See `Ranks`."""
        try:
            self._meeting.turns.say({"what": "end", "failed": failed})
        except Fatal as error:
            log.warning("the other ranks were not told of the end", extra={"why": str(error)})
