"""The calls of the learner's loop to its other ranks; they do nothing where there are none.

Rank 0 holds the lease, reads the log, publishes and writes checkpoints as a single rank does. All others
get its state at the start, are told of every update before it begins, and end when it ends.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

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

# ---- Division of a batch's payloads among the ranks: rank 0 assigns entries, each rank fetches its own.

_PUT_WAIT_S: Final = 0.2
_COLUMNS: Final = 5
"""State, steps, bits of the reward, digest as a number, length of the digest."""


class SharedPayloads:
    """Implements `Payloads` on rank 0."""

    def __init__(self, own: Payloads, connection: RankConnection) -> None:
        self._own = own
        self._connection = connection

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        """Let each rank check a part of the entries, and return all results.

        Each rank keeps only its own payloads.
        """
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
        words = {
            "what": what,
            "of": len(entries),
            "first": [part.start for part in parts],
            "numbers": numbers,
        }
        self._connection.say(words)
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


log = logging.getLogger(__name__)


RESTORED: Final = Update(applied=True, reason="", steps=0, gradient_steps=0, metrics={})
"""What ranks compare after a restore, beside their weights."""


class Ranks(Protocol):
    """The ranks of this learner, seen from rank 0."""

    def start(self, algorithm: Algorithm) -> None:
        """Send the current state of `algorithm` to all ranks."""
        ...

    def payloads(self, own: Payloads) -> Payloads:
        """Return the source from which the feed takes payloads; `own`: that of this rank alone."""
        ...

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Announce an update before it begins. progress: share of the run that is done, 0 to 1.

        is_flushed: see `Batch`.
        """
        ...

    def skip(self) -> None:
        """Drop the batch that every rank has its part of."""
        ...

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Have all ranks restore what `algorithm` has; raises Fatal unless all of them then agree."""
        ...

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Compare the ranks after an update; raises Fatal when they have drifted apart."""
        ...

    def end(self, *, failed: bool) -> None:
        """Let the other ranks end. failed: whether they end with a failure."""
        ...


class SingleRank:
    """A learner of one process: there is no other rank to call."""

    def start(self, algorithm: Algorithm) -> None:
        """Do nothing."""

    def payloads(self, own: Payloads) -> Payloads:
        """Return `own`."""
        return own

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Do nothing."""

    def skip(self) -> None:
        """Do nothing."""

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Do nothing."""

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Do nothing."""

    def end(self, *, failed: bool) -> None:
        """Do nothing."""


class LeadingRank:
    """Rank 0 of several. drain: called, with the reason, when another rank was asked to end."""

    def __init__(self, meeting: Meeting, drain: Callable[[str], None]) -> None:
        self._meeting = meeting
        self._drain = drain

    def start(self, algorithm: Algorithm) -> None:
        """Send the current state of `algorithm` to all ranks."""
        state = algorithm.state()
        self._meeting.turns.say({"what": "state", "numbers": state.numbers}, save(state.tensors))

    def payloads(self, own: Payloads) -> Payloads:
        """Return a source that divides payloads among the ranks."""
        return SharedPayloads(own, self._meeting.feed)

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Announce an update before it begins."""
        self._meeting.turns.say({"what": "update", "progress": progress, "is_flushed": is_flushed})

    def skip(self) -> None:
        """Drop the batch that every rank has its part of."""
        self._meeting.turns.say({"what": "skip"})

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Have all ranks restore what `algorithm` has; raises Fatal unless all of them then agree."""
        self._meeting.turns.say({"what": "restore", "numbers": state.numbers}, save(state.tensors))
        self.agree(algorithm, RESTORED)

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Compare the ranks after an update; raises Fatal when they have drifted apart."""
        if self._meeting.agree(algorithm, update, draining=False):
            self._drain("another rank was asked to end")

    def end(self, *, failed: bool) -> None:
        """Let the other ranks end; ranks that are gone already are skipped."""
        try:
            self._meeting.turns.say({"what": "end", "failed": failed})
        except Fatal as error:
            log.warning("the other ranks were not told of the end", extra={"why": str(error)})
