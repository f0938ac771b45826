"""The commands of operators, executed one after the other between two updates.

    flush: request servers to send ─► all have sent, or FLUSH_WAIT_S is over: Redis fixes its last entry
           ─► the feed takes the pending entries up to it ─► trained and booked: done ─► commit
    state in Redis: pending ─► refused: answered at once
                            └► done: noted in the record ─► answered by the next commit, with its id

A crash before the commit leaves the command pending, and the learner that resumes executes it again.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.log.replies import Answer, Command, CommandRefusal
from penstock.learner.algorithms.algorithm import AlgorithmState
from penstock.learner.checkpoint.store import Checkpoint, Damaged, NameRefused, NoRoom
from penstock.learner.feed.log_feed import Flush, LogBatch
from penstock.learner.feed.recording import RecordedAction
from penstock.learner.ledger import check_network
from penstock.runtime.exit import RunFailed
from penstock.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from penstock.learner.learner import Learner

FLUSH_WAIT_S: Final = 30.0
"""Longest wait for policy servers in a flush, in seconds."""
_REMEMBERED: Final = 16
"""Answers that are kept by request id, as many as commands may wait: Redis may have lost an answer."""

log = logging.getLogger(__name__)


class _Refused(Exception):
    """Raised for a command that is not executed."""

    def __init__(self, refusal: CommandRefusal, detail: str, *, steps: int = 0) -> None:
        super().__init__(detail)
        self.refusal = refusal
        self.steps = steps


_REFUSED_AS: Final = {
    NameRefused: CommandRefusal.NAME,
    NoRoom: CommandRefusal.LIMIT,
    Damaged: CommandRefusal.MISMATCH,
}
_REFUSALS: Final = (_Refused, NameRefused, NoRoom, Damaged)


@dataclass(slots=True)
class CommandRecord:
    """The executed commands, as checkpoints hold them, so that each is executed once.

    newest: number of the newest executed command.
    """

    newest: int = 0
    _answers: dict[str, Answer] = field(default_factory=dict)
    _uncommitted: dict[str, Answer] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], checkpoint_id: str) -> "CommandRecord":
        found = [Answer(**value) for value in state.get("answers", ())]
        answers = {one.request_id: _within(one, checkpoint_id) for one in found}
        return cls(int(state.get("newest", 0)), answers)

    def state(self) -> dict[str, Any]:
        return {"newest": self.newest, "answers": [asdict(answer) for answer in self._answers.values()]}

    def is_wanted(self, command: Command) -> bool:
        """Return whether to execute a command; also again, where the checkpoint that contains it was lost."""
        if command.request_id in self._answers:
            return False
        answer = command.answer
        return answer is None or (not answer.refusal and command.number > self.newest)

    def known(self, command: Command) -> Answer | None:
        """Return the answer of an executed command whose answer Redis has lost, or None."""
        answer = self._answers.get(command.request_id)
        if answer is None or command.answer is not None or command.request_id in self._uncommitted:
            return None
        return replace(answer, number=command.number)

    def note_done(self, answer: Answer) -> None:
        self.newest = max(self.newest, answer.number)
        self._answers[answer.request_id] = self._uncommitted[answer.request_id] = answer
        while len(self._answers) > _REMEMBERED:
            del self._answers[next(iter(self._answers))]

    def uncommitted(self, checkpoint_id: str) -> tuple[Answer, ...]:
        return tuple(_within(answer, checkpoint_id) for answer in self._uncommitted.values())

    def committed(self, checkpoint_id: str) -> None:
        for request_id, answer in self._uncommitted.items():
            self._answers[request_id] = _within(answer, checkpoint_id)
        self._uncommitted.clear()


def _within(answer: Answer, checkpoint_id: str) -> Answer:
    return answer if answer.checkpoint_id else replace(answer, checkpoint_id=checkpoint_id)


class CommandFollower:
    """Executes the commands for a learner, in its thread."""

    def __init__(self, learner: "Learner", record: CommandRecord) -> None:
        self._learner, self.record = learner, record
        self._flush: Flush | None = None
        self._flushed: Answer | None = None
        self._flush_since: float | None = None
        self._silent = 0
        self._seen_revision = -1
        self._waiting: deque[Command] = deque()

    def begin(self, *, went_back: bool) -> None:
        """Read the pending commands. went_back: to an older checkpoint; later commands are not repeated."""
        if went_back:
            done = [one.number for one in self._commands() if one.answer is not None]
            self.record.newest = max([self.record.newest, *done])
        self._look()
        if self._waiting and self._waiting[0].action == "flush":
            # A flush with a last entry is the same batch again: the feed must know before it reads.
            with suppress(_Refused):
                self._flush_decided(self._waiting[0])

    def follow(self) -> None:
        revision = self._learner.lease.renewal.revision
        if revision != self._seen_revision:
            self._seen_revision = revision
            self._look()
        while self._waiting and self._do(self._waiting[0]):
            self._waiting.popleft()

    def booked(self, log_batch: LogBatch) -> None:
        """Note that a batch was consumed; that of a flush is answered with the next checkpoint."""
        if self._flush is None or log_batch.flush != self._flush.number:
            return
        silent = f"; {self._silent} policy servers had not answered" if self._silent else ""
        detail = f"a batch of {log_batch.steps} steps, entries up to {self._flush.through}{silent}"
        self._flushed = _answer(self._waiting[0], detail, steps=log_batch.steps)
        self.record.note_done(self._flushed)

    def repeat(self, log_batch: LogBatch) -> None:
        """Repeat what the recorded learner did between two batches; raises RunFailed if it cannot."""
        event = log_batch.event
        assert event is not None, "the learner calls this for events only"
        try:
            if event.action == "restore":
                self._go_back(event.name)
            else:
                self._learner.name_checkpoint(event.name, f"recorded-{event.command}")
        except _REFUSALS as error:
            raise RunFailed(
                f"the recording cannot be repeated: {event.action} {event.name!r}: {error}"
            ) from error
        self._record("restore" if event.action == "restore" else "checkpoint", event.name, event.command)
        self._learner.ledger.recorded = log_batch.recorded
        self._learner.checkpoints.consumed(0)

    def _look(self) -> None:
        waiting = {command.number for command in self._waiting}
        for command in self._commands():
            known = self.record.known(command)
            if known is not None:
                self._answer(known)
            elif command.number not in waiting and self.record.is_wanted(command):
                self._waiting.append(command)

    def _commands(self) -> list[Command]:
        return self._learner.lease.patiently(self._learner.learner_log.commands)

    def _do(self, command: Command) -> bool:
        """Execute a command; returns whether it is done or refused."""
        failpoint("command.before", command.number)
        follow = {"checkpoint": self._checkpoint, "restore": self._restore, "flush": self._follow_flush}
        try:
            answer = follow[command.action](command)
        except _REFUSALS as error:
            self._refuse(command, error)
            return True
        if answer is None:
            return False
        self.record.note_done(answer)
        self._learner.checkpoint()
        self._learner.lease.wake()  # the operator reads the learner's description next
        self._end_flush()
        failpoint("command.after", command.number)
        return True

    def _refuse(self, command: Command, error: Exception) -> None:
        why = {"number": command.number, "command": command.action, "why": str(error)}
        log.warning("command refused", extra=why)
        if command.answer is None:
            refused = error if isinstance(error, _Refused) else _Refused(_REFUSED_AS[type(error)], str(error))
            self._answer(_answer(command, str(error), refusal=refused.refusal, steps=refused.steps))
        self._end_flush()

    # ---- a flush

    def _follow_flush(self, command: Command) -> Answer | None:
        """Return the answer once the flushed batch was trained, None until then."""
        if self._flushed is not None:
            return self._flushed
        if self._flush is None:
            self._check_flush(command)
            self._decide_flush(command)
            return None
        pending = self._learner.feed.too_few(command.number)
        if pending is None:
            return None
        raise _Refused(
            CommandRefusal.TOO_FEW_STEPS,
            f"{pending} steps are pending, fewer than the {self._flush.least} asked for",
            steps=pending,
        )

    def _check_flush(self, command: Command) -> None:
        algorithm = self._learner.algorithm
        if algorithm.flush_below is None:
            why = "in lock-step a round is whole" if algorithm.lock_step else "nothing waits for a batch"
            raise _Refused(CommandRefusal.UNSUPPORTED, f"{type(algorithm).__name__} has no flush: {why}")
        if int(command.argument) > algorithm.flush_below:
            raise _Refused(
                CommandRefusal.TOO_FEW_STEPS,
                f"min_steps={command.argument}: a batch of {algorithm.flush_below} steps is taken without a "
                "flush; give at most that",
            )

    def _decide_flush(self, command: Command) -> None:
        now = time.monotonic()
        self._flush_since = self._flush_since or now
        force = now - self._flush_since >= FLUSH_WAIT_S
        self._silent, through = self._learner.lease.patiently(
            lambda: self._learner.learner_log.flush(command.number, force=force)
        )
        if through is not None:
            failpoint("flush.decided", through)
            self._flush_decided(replace(command, through=through))

    def _flush_decided(self, command: Command) -> None:
        if command.through is None or self._learner.algorithm.flush_below is None:
            return
        flush = Flush(number=command.number, least=int(command.argument), through=command.through)
        try:
            self._learner.feed.flush(flush)
        except NotImplementedError as error:
            raise _Refused(CommandRefusal.UNSUPPORTED, str(error)) from error
        self._flush = flush

    def _end_flush(self) -> None:
        self._flush = self._flushed = self._flush_since = None

    def _checkpoint(self, command: Command) -> Answer:
        name = command.argument
        if not name:
            return _answer(command, "the run as it is")
        self._learner.name_checkpoint(name, command.request_id)
        self._record("checkpoint", name, command.number)
        return _answer(command, f"kept as {name}")

    def _restore(self, command: Command) -> Answer:
        version = self._go_back(command.argument)
        self._record("restore", command.argument, command.number)
        return _answer(command, f"published as version {version}", version=version)

    def _go_back(self, name: str) -> int:
        """Restore the model of a named checkpoint; returns the version under which it was published."""
        learner = self._learner
        checkpoint = learner.named.read(name)
        failpoint("restore.read")
        learner.publisher.flush()
        self._take_over(checkpoint)
        failpoint("restore.applied")
        if not learner.algorithm.keeps_restored:
            # Versions rise, and no other thread publishes: all published versions are below this.
            learner.ledger.restored_from = learner.learner_log.snapshot().version + 1
            learner.feed.drop_before(learner.ledger.restored_from)
        version = learner.publish_restored()
        failpoint("restore.published")
        log.info("restored a named checkpoint", extra={"checkpoint": name, "version": version})
        return version

    def _take_over(self, checkpoint: Checkpoint) -> None:
        learner = self._learner
        state = AlgorithmState(tensors=checkpoint.tensors, numbers=checkpoint.state["numbers"])
        try:
            check_network(learner.settings.run, checkpoint.state["sections"], learner.sections)
            learner.algorithm.restore(state)
        except ValueError as error:
            raise _Refused(CommandRefusal.MISMATCH, f"checkpoint {checkpoint.id}: {error}") from error
        except NotImplementedError as error:
            raise _Refused(CommandRefusal.UNSUPPORTED, str(error)) from error
        learner.ranks.restore(learner.algorithm, state)

    def _record(self, action: RecordedAction, name: str, command: int) -> None:
        learner = self._learner
        if learner.recording is not None:
            position, update = learner.ledger.position, learner.algorithm.updates
            learner.recording.event(action, name, command, position=position, update=update)

    def _answer(self, answer: Answer) -> None:
        self._learner.lease.patiently(lambda: self._learner.learner_log.answer(answer))


def _answer(command: Command, detail: str, *, refusal: int = 0, version: int = 0, steps: int = 0) -> Answer:
    return Answer(
        number=command.number,
        request_id=command.request_id,
        detail=detail,
        refusal=refusal,
        version=version,
        steps=steps,
    )
