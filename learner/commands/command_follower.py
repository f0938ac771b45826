"""Follows the commands of operators, one after the other, between two updates.

    Redis: pending ─► refused: answered at once
                   └► done: noted in the record ─► the next commit answers it, with the checkpoint's id

A crash before the commit leaves the command pending, and the learner that resumes follows it again. What was
done may be asked for again where Redis or a checkpoint was lost; the record knows.
"""

import logging
from collections import deque
from dataclasses import dataclass, field

from broker.log.commands import Answer, Command, CommandRefusal
from broker.log.learner_log import LearnerLog
from learner.checkpoint.named_checkpoints import NamedCheckpoints, NameRefused, NoRoom
from learner.checkpoint.run_checkpoints import RunCheckpoints
from learner.checkpoint.store import Damaged
from learner.commands.command_record import CommandRecord
from learner.commands.restoration import Mismatch, Restoration, Unsupported
from learner.feed.log_batch import LogBatch
from learner.feed.source import FeedPosition
from learner.lease import LeaseKeeper
from learner.recording.recorded_event import RecordedEvent
from learner.recording.writer import RecordingWriter
from penstock.runtime.exit import RunFailed
from penstock.runtime.failpoint import failpoint

log = logging.getLogger(__name__)


class _Refused(Exception):
    """Carries why a command is not done."""

    def __init__(self, refusal: CommandRefusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal


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
    recording: RecordingWriter | None
    _seen_revision: int = field(init=False, default=-1)
    _waiting: deque[Command] = field(init=False, default_factory=deque)

    def begin(self, *, went_back: bool) -> None:
        """Look at what is asked for.

        went_back: an operator chose an older checkpoint, so what was done since is not done again.
        """
        if went_back:
            done = [one.number for one in self._commands() if one.answer is not None]
            self.record.newest = max([self.record.newest, *done])

    def follow(self) -> None:
        """Do what is asked for, in order."""
        revision = self.lease.renewal.revision
        if revision != self._seen_revision:
            self._seen_revision = revision
            self._look()
        while self._waiting:
            self._do(self._waiting.popleft())

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

    def _do(self, command: Command) -> None:
        failpoint("command.before", command.number)
        try:
            answer = self._checkpoint(command) if command.action == "checkpoint" else self._restore(command)
        except _Refused as refused:
            said = {"number": command.number, "command": command.action, "why": str(refused)}
            log.warning("command refused", extra=said)
            self._answer(_answer(command, str(refused), refusal=refused.refusal))
            return
        self.record.note_done(answer)
        self.checkpoints.save()
        failpoint("command.after", command.number)

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
    command: Command, detail: str, *, refusal: CommandRefusal | None = None, version: int = 0
) -> Answer:
    return Answer(
        number=command.number,
        request_id=command.request_id,
        detail=detail,
        refusal=refusal or 0,
        version=version,
    )
