"""What rank 0 has the other ranks of its learner do, and the loop in which they do it.

    rank 0   start → [begin_update → own part → agree | skip | restore → agree] → end
    others   hear "state" → restore it → [hear "update" → own part of the batch → update → agree
                                         | hear "skip" → own part of the batch → drop it
                                         | hear "restore" → take over → agree] → hear "end"

Rank 0 holds the lease, reads the log, publishes and writes checkpoints as a single rank does. The others
connect to Redis to read payloads and write nothing there. Asked to end by a signal such a rank tells rank 0
with the next update, and ends with it; when rank 0 is gone it ends at once, with exit 1. Health watches that
an update that has begun is made; waiting for rank 0 is not counted as a stall.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from safetensors.torch import load, save

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import LogEntry
from penstock.config.settings import Settings
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Update
from penstock.learner.batch import Staged
from penstock.learner.failures import UPDATE
from penstock.learner.feed.log_feed import ReadAhead
from penstock.learner.feed.payloads import Found, OwnPayloads, Payloads, State
from penstock.learner.ledger import DIGEST_BYTES
from penstock.learner.model import Model
from penstock.learner.ranks.rendezvous import Meeting, RankConnection, divide
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle, leave

log = logging.getLogger(__name__)

RESTORED: Final = Update(applied=True)
"""What ranks compare after a restore, beside their weights."""

# ---- Rank 0.


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


@dataclass(frozen=True, slots=True)
class LeadingRank(Ranks):
    """Rank 0 of several. drain: called, with the reason, when another rank was asked to end."""

    meeting: Meeting
    drain: Callable[[str], None]

    def start(self, algorithm: Algorithm) -> None:
        self._say_state("state", algorithm.state())

    def payloads(self, own: Payloads) -> Payloads:
        return SharedPayloads(own, self.meeting.feed)

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        self.meeting.turns.say({"what": "update", "progress": progress, "is_flushed": is_flushed})

    def skip(self) -> None:
        self.meeting.turns.say({"what": "skip"})

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        self._say_state("restore", state)
        self.agree(algorithm, RESTORED)

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        if self.meeting.agree(algorithm, update, draining=False):
            self.drain("another rank was asked to end")

    def end(self, *, failed: bool) -> None:
        try:
            self.meeting.turns.say({"what": "end", "failed": failed})
        except Fatal as error:
            log.warning("the other ranks were not told of the end", extra={"why": str(error)})

    def _say_state(self, what: str, state: AlgorithmState) -> None:
        self.meeting.turns.say({"what": what, "numbers": state.numbers}, save(state.tensors))


@dataclass(frozen=True, slots=True)
class SharedPayloads:
    """Implements `Payloads` on rank 0: it assigns entries, and each rank fetches its own."""

    own: Payloads
    connection: RankConnection

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        """Let each rank check a part of the entries, of which it keeps the payloads; return all results."""
        mine = entries[self._divided("check", entries)[0]]
        numbers = torch.zeros((len(entries), _COLUMNS), dtype=torch.int64)
        for row, found in zip(numbers, self.own.check(mine), strict=False):
            row.copy_(_numbers(found))
        return [_found(*row) for row in self.connection.add_up(numbers).tolist()]

    def batch(self, entries: Sequence[LogEntry]) -> Staged:
        """Assign the entries, and return rank 0's own part."""
        return self.own.batch(entries[self._divided("batch", entries)[0]])

    def _divided(self, what: str, entries: Sequence[LogEntry]) -> list[slice]:
        """Send every rank its part: the index of its first entry among all, and its numbers."""
        charges = [0 if entry.header is None else entry.header.charge for entry in entries]
        parts = divide(charges, self.connection.size)
        numbers = [[entry.number for entry in entries[part]] for part in parts]
        first = [part.start for part in parts]
        self.connection.say({"what": what, "of": len(entries), "first": first, "numbers": numbers})
        return parts


_COLUMNS: Final = 5
"""State, steps, bits of the reward, digest as a number, length of the digest."""


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


# ---- Every other rank.


def follow(
    lifecycle: Lifecycle,
    settings: Settings,
    meeting: Meeting,
    model: Model,
    health: Health,
    connect: Callable[[], LearnerLog],
) -> int:
    """Make updates until rank 0 ends; returns the exit code. Raises Fatal when rank 0 has failed or is gone.

    model: of this rank. connect: opens the log, from which payloads are read.
    """
    words, data = meeting.turns.hear()
    if words["what"] == "end":
        return _ended(words)
    model.algorithm.load(AlgorithmState(tensors=load(data), numbers=words["numbers"]))
    threads, learner_log = ThreadGroup(), connect()
    own = OwnPayloads(learner_log, settings, model.specification.schema, model.ranges, model.device)
    ahead = ReadAhead[Staged](settings.learner.prefetch_batches, threads.stop)
    feed = FollowingFeed(learner_log, own, meeting.feed, ahead, threads.stop)
    threads.start("feed", feed.run)
    health.watch(UPDATE, settings.learner.stall_timeout_s)
    health.suspend(UPDATE)
    health.set_ready(True)
    while True:
        began = time.perf_counter()
        words, data = meeting.turns.hear()
        metrics.RANK_WAIT_SECONDS.inc(time.perf_counter() - began)
        if words["what"] == "end":
            return _ended(words)
        health.expect(UPDATE, "its part of the batch did not come, or other ranks did not answer")
        update = _do(words, data, model, ahead)
        if update is not None:
            meeting.agree(model.algorithm, update, draining=lifecycle.draining.is_set())
        health.progress(UPDATE)
        health.suspend(UPDATE)


def _do(words: dict[str, Any], data: bytes, model: Model, ahead: ReadAhead[Staged]) -> Update | None:
    """Do this rank's part of what rank 0 does; returns what all ranks compare, if anything."""
    if words["what"] == "restore":
        model.algorithm.restore(AlgorithmState(tensors=load(data), numbers=words["numbers"]))
        return RESTORED
    # The batch is ready or on its way, because rank 0 has it.
    while (staged := ahead.take(_TAKE_S)) is None:
        pass
    staged.arrive()
    if words["what"] == "skip":
        return None
    batch = replace(staged.batch, is_flushed=words["is_flushed"])
    update = model.algorithm.update(batch, progress=words["progress"])
    metrics.RANK_UPDATES.inc()
    return update


def _ended(words: dict[str, Any]) -> int:
    if words["failed"]:
        raise Fatal("rank 0 of this learner has failed, so this one ends; its log says why")
    log.info("rank 0 has ended")
    return EXIT_OK


_TAKE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FollowingFeed:
    """Reads ahead what rank 0 has this rank read: call `run` in a thread."""

    learner_log: LearnerLog
    own: Payloads
    connection: RankConnection
    ahead: ReadAhead[Staged]
    stop: threading.Event

    def run(self) -> None:
        """Execute rank 0's requests until `stop`; an error ends the process.

        The main thread may be waiting for rank 0, which waits for this thread: only this one can end the
        process.
        """
        try:
            while not self.stop.is_set():
                self._follow()
        except Exception as error:
            log.exception("a thread of this rank died")
            sys.stderr.write(f"{error}\n")
            leave(EXIT_FAILED)

    def _follow(self) -> None:
        words, _ = self.connection.hear()
        numbers = [int(number) for number in words["numbers"][self.connection.rank]]
        if words["what"] == "check":
            self._check(numbers, int(words["first"][self.connection.rank]), int(words["of"]))
            return
        entries = self._entries(numbers)
        if len(entries) != len(numbers):
            raise Fatal(f"of log entries {numbers[0]}..{numbers[-1]} some were good and are gone now")
        self.ahead.put(self.own.batch(entries))

    def _check(self, numbers: list[int], first: int, of: int) -> None:
        """Check entries; an entry that is no longer there counts as missing, as its payload would."""
        entries = self._entries(numbers)
        found = dict(zip([entry.number for entry in entries], self.own.check(entries), strict=True))
        answer = torch.zeros((of, _COLUMNS), dtype=torch.int64)
        for row, number in enumerate(numbers, first):
            answer[row] = _numbers(found.get(number, Found(State.MISSING)))
        self.connection.add_up(answer)

    def _entries(self, numbers: list[int]) -> list[LogEntry]:
        by_number = {
            entry.number: entry for entry in self.learner_log.entries(numbers) if entry.header is not None
        }
        return [by_number[number] for number in numbers if number in by_number]
