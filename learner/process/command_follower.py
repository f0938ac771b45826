"""Follows the commands of operators, one after the other, between two updates.

A flush takes several turns of the loop, in which ordinary batches are learned:

    ask servers ─► all have answered, or FLUSH_WAIT_S is over: its last entry is decided, in Redis
                ─► the feed takes what is pending up to there ─► booked: done ─► commit

    Redis: pending ─► refused: answered at once
                   └► done: noted in the record ─► the next commit answers it, with the checkpoint's id

A crash before the commit leaves the command pending, and the learner that resumes follows it again. What was
done may be asked for again where Redis or a checkpoint was lost; the record knows.
"""

import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Answer, Command, CommandRefusal
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState
from penstock.learner.checkpoint.store import Checkpoint, Damaged, NamedCheckpoints, NameRefused, NoRoom
from penstock.learner.feed.recorded_event import RecordedEvent
from penstock.learner.feed.source import Feed, FeedPosition, Flush, LogBatch
from penstock.learner.lease import LeaseKeeper
from penstock.learner.process.run_checkpoints import CommandRecord, RunCheckpoints
from penstock.learner.progress import check_network
from penstock.learner.publish.publisher import WeightOffers
from penstock.learner.ranks.leading import Ranks
from penstock.learner.recording.writer import RecordingWriter
from penstock.runtime.exit import RunFailed
from penstock.runtime.failpoint import failpoint

# ---- Going back to the model of a named checkpoint while the run goes on.

log = logging.getLogger(__name__)


class Mismatch(Exception):
    """Reports a checkpoint of another network or space; the message names what differs."""


class Unsupported(Exception):
    """Reports a command that has no meaning for what this run learns by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """Used by the loop's thread. run, sections: of this run, see `penstock.learner.progress`."""

    run: str
    sections: dict[str, str]
    named: NamedCheckpoints
    algorithm: Algorithm
    ranks: Ranks
    feed: Feed
    position: FeedPosition
    offers: WeightOffers
    learner_log: LearnerLog

    def restore(self, name: str) -> int:
        """Go back to the checkpoint of that name; returns the version under which it was published.

        Raises:
            NameRefused: no checkpoint has the name.
            Damaged: it is not whole.
            Mismatch: it is of another network or space.
            Unsupported: the algorithm cannot go back.
        """
        checkpoint = self.named.read(name)
        failpoint("restore.read")
        self.offers.publisher.flush()
        self._take_over(checkpoint)
        failpoint("restore.applied")
        if not self.algorithm.keeps_restored:
            # Versions rise, and no other thread publishes: whatever was published before is below this.
            self.position.restored_from = self.learner_log.snapshot().version + 1
            self.feed.drop_before(self.position.restored_from)
        version = self.offers.publish_restored()
        failpoint("restore.published")
        log.info("restored a named checkpoint", extra={"checkpoint": name, "version": version})
        return version

    def _take_over(self, checkpoint: Checkpoint) -> None:
        state = AlgorithmState(tensors=checkpoint.tensors, numbers=checkpoint.state["numbers"])
        try:
            check_network(self.run, checkpoint.state["sections"], self.sections)
            self.algorithm.restore(state)
        except ValueError as error:
            raise Mismatch(f"checkpoint {checkpoint.id}: {error}") from error
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
        self.ranks.restore(self.algorithm, state)


FLUSH_WAIT_S: Final = 30.0
"""Longest wait for policy servers: one that hangs holds a flush up no longer."""


class _Refused(Exception):
    """Carries why a command is not done."""

    def __init__(self, refusal: CommandRefusal, detail: str, *, steps: int = 0) -> None:
        super().__init__(detail)
        self.refusal = refusal
        self.steps = steps


@dataclass(slots=True, kw_only=True, eq=False)
class CommandFollower:
    """Used by the loop's thread. recording: None where the run records nothing."""

    learner_log: LearnerLog
    lease: LeaseKeeper
    record: CommandRecord
    checkpoints: RunCheckpoints
    named: NamedCheckpoints
    restoration: Restoration
    position: FeedPosition
    feed: Feed
    recording: RecordingWriter | None
    _flush: Flush | None = field(init=False, default=None)
    _asked_since: float | None = field(init=False, default=None)
    _flushed: Answer | None = field(init=False, default=None)
    _silent: int = field(init=False, default=0)
    _seen_revision: int = field(init=False, default=-1)
    _waiting: deque[Command] = field(init=False, default_factory=deque)

    def begin(self, *, went_back: bool) -> None:
        """Look at what is asked for.

        went_back: an operator chose an older checkpoint, so what was done since is not done again.
        """
        if went_back:
            done = [one.number for one in self._commands() if one.answer is not None]
            self.record.newest = max([self.record.newest, *done])
        self._look()
        if self._waiting and self._waiting[0].action == "flush":
            # A flush that is decided is the same batch again: the feed must know before it reads on.
            with suppress(_Refused):
                self._flush_decided(self._waiting[0])

    def follow(self) -> None:
        """Do what is asked for, in order."""
        revision = self.lease.renewal.revision
        if revision != self._seen_revision:
            self._seen_revision = revision
            self._look()
        while self._waiting and self._do(self._waiting[0]):
            self._waiting.popleft()

    def booked(self, log_batch: LogBatch) -> None:
        """A batch was consumed. What was a flush is done with the next checkpoint, made for any reason."""
        if self._flush is None or log_batch.flush != self._flush.number:
            return
        silent = f"; {self._silent} policy servers had not answered" if self._silent else ""
        detail = f"a batch of {log_batch.steps} steps, entries up to {self._flush.through}{silent}"
        self._flushed = _answer(self._waiting[0], detail, steps=log_batch.steps)
        self.record.note_done(self._flushed)

    def repeat(self, log_batch: LogBatch) -> None:
        """Do what the learner of a recording did between two batches.

        Raises RunFailed where it cannot be repeated.
        """
        event = log_batch.event
        assert event is not None, "the loop asks for events alone"
        try:
            if event.action == "restore":
                self.restoration.restore(event.name)
            else:
                self.checkpoints.save_named(event.name, f"recorded-{event.command}", self.named)
        except (NameRefused, NoRoom, Damaged, Mismatch, Unsupported) as error:
            raise RunFailed(
                f"the recording cannot be repeated: {event.action} {event.name!r}: {error}"
            ) from error
        self._note(event)
        self.position.advance(log_batch)
        self.checkpoints.consumed(0)

    # ---- one command

    def _look(self) -> None:
        waiting = {command.number for command in self._waiting}
        for command in self._commands():
            known = self.record.known(command)
            if known is not None:
                self._answer(known)
            elif command.number not in waiting and self.record.is_wanted(command):
                self._waiting.append(command)

    def _commands(self) -> list[Command]:
        return self.lease.patiently(self.learner_log.commands)

    def _do(self, command: Command) -> bool:
        """Return whether the command is done or refused."""
        failpoint("command.before", command.number)
        follow = {"checkpoint": self._checkpoint, "restore": self._restore, "flush": self._follow_flush}
        try:
            answer = follow[command.action](command)
        except _Refused as refused:
            said = {"number": command.number, "command": command.action, "why": str(refused)}
            log.warning("command refused", extra=said)
            if command.answer is None:
                self._answer(_answer(command, str(refused), refusal=refused.refusal, steps=refused.steps))
            self._end_flush()
            return True
        if answer is None:
            return False
        self.record.note_done(answer)
        self.checkpoints.save()
        self.lease.wake()  # who asked reads next what the learner says of itself
        self._end_flush()
        failpoint("command.after", command.number)
        return True

    # ---- a flush

    def _follow_flush(self, command: Command) -> Answer | None:
        """Return the answer once its batch was learned, None until then."""
        if self._flushed is not None:
            return self._flushed
        if self._flush is None:
            self._check_flush(command)
            self._decide_flush(command)
            return None
        pending = self.feed.too_few(command.number)
        if pending is None:
            return None
        raise _Refused(
            CommandRefusal.TOO_FEW_STEPS,
            f"{pending} steps are pending, fewer than the {self._flush.least} asked for",
            steps=pending,
        )

    def _check_flush(self, command: Command) -> None:
        algorithm = self.checkpoints.algorithm
        if algorithm.flush_below is None:
            why = "in lock-step a round is whole" if algorithm.lock_step else "nothing waits for a batch"
            raise _Refused(CommandRefusal.UNSUPPORTED, f"{type(algorithm).__name__} has no flush: {why}")
        if int(command.argument) > algorithm.flush_below:
            raise _Refused(
                CommandRefusal.TOO_FEW_STEPS,
                f"min_steps={command.argument}: a batch of {algorithm.flush_below} steps is taken without "
                "being asked; ask for at most that",
            )

    def _decide_flush(self, command: Command) -> None:
        now = time.monotonic()
        self._asked_since = self._asked_since or now
        force = now - self._asked_since >= FLUSH_WAIT_S
        self._silent, through = self.lease.patiently(
            lambda: self.learner_log.flush(command.number, force=force)
        )
        if through is not None:
            failpoint("flush.decided", through)
            self._flush_decided(replace(command, through=through))

    def _flush_decided(self, command: Command) -> None:
        if command.through is None or self.checkpoints.algorithm.flush_below is None:
            return
        flush = Flush(number=command.number, least=int(command.argument), through=command.through)
        try:
            self.feed.flush(flush)
        except NotImplementedError as error:
            raise _Refused(CommandRefusal.UNSUPPORTED, str(error)) from error
        self._flush = flush

    def _end_flush(self) -> None:
        self._flush = self._flushed = self._asked_since = None

    def _checkpoint(self, command: Command) -> Answer:
        name = command.argument
        if not name:
            return _answer(command, "the run as it is")
        try:
            self.checkpoints.save_named(name, command.request_id, self.named)
        except NameRefused as error:
            raise _Refused(CommandRefusal.NAME, str(error)) from error
        except NoRoom as error:
            raise _Refused(CommandRefusal.LIMIT, str(error)) from error
        except Damaged as error:
            raise _Refused(CommandRefusal.MISMATCH, str(error)) from error
        self._note(RecordedEvent("checkpoint", name, command.number))
        return _answer(command, f"kept as {name}")

    def _restore(self, command: Command) -> Answer:
        try:
            version = self.restoration.restore(command.argument)
        except NameRefused as error:
            raise _Refused(CommandRefusal.NAME, str(error)) from error
        except (Mismatch, Damaged) as error:
            raise _Refused(CommandRefusal.MISMATCH, str(error)) from error
        except Unsupported as error:
            raise _Refused(CommandRefusal.UNSUPPORTED, str(error)) from error
        self._note(RecordedEvent("restore", command.argument, command.number))
        return _answer(command, f"published as version {version}", version=version)

    def _note(self, event: RecordedEvent) -> None:
        if self.recording is not None:
            self.recording.event(event, self.checkpoints.ledger.position, self.checkpoints.algorithm.updates)

    def _answer(self, answer: Answer) -> None:
        self.lease.patiently(lambda: self.learner_log.answer(answer))


def _answer(
    command: Command,
    detail: str,
    *,
    refusal: CommandRefusal | None = None,
    version: int = 0,
    steps: int = 0,
) -> Answer:
    return Answer(
        number=command.number,
        request_id=command.request_id,
        detail=detail,
        refusal=refusal or 0,
        version=version,
        steps=steps,
    )
