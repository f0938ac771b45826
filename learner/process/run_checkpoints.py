"""Checkpoints of a run: collects what every part must remember and has the checkpointer write it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from penstock.broker.log.replies import Answer, Command
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.checkpoint.store import BEST, NamedCheckpoints, bytes_tensor
from penstock.learner.evaluation import Episodes, Evaluation
from penstock.learner.feed.source import FeedPosition
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Ledger
from penstock.learner.probe import Quarantine
from penstock.learner.progress import Progress
from penstock.learner.publish.publisher import Publisher
from penstock.learner.recording.writer import RecordingWriter
from penstock.learner.reporting.recorder import Staleness, TrainingClock

# ---- The commands that were done, as checkpoints remember them: none is done twice, and none is forgotten.

_REMEMBERED: Final = 16
"""Answers by request id: as many as may wait, so that one asked again after Redis forgot it is known."""


@dataclass(slots=True)
class CommandRecord:
    """Used by the loop's thread. newest: number of the newest command that was done."""

    newest: int = 0
    _answers: dict[str, Answer] = field(default_factory=dict)
    _uncommitted: dict[str, Answer] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], checkpoint_id: str) -> "CommandRecord":
        """Return the record of a checkpoint; state: what `state` returned, {} for none."""
        found = [Answer.from_json(value) for value in state.get("answers", ())]
        answers = {one.request_id: _within(one, checkpoint_id) for one in found}
        return cls(int(state.get("newest", 0)), answers)

    def state(self) -> dict[str, Any]:
        """Return a JSON object for a checkpoint."""
        return {"newest": self.newest, "answers": [asdict(answer) for answer in self._answers.values()]}

    def is_wanted(self, command: Command) -> bool:
        """Return whether a command is still to be followed.

        One that was done is done again where the checkpoint that contains it was lost.
        """
        if command.request_id in self._answers:
            return False
        answer = command.answer
        return answer is None or (not answer.refusal and command.number > self.newest)

    def known(self, command: Command) -> Answer | None:
        """Return the answer of a command that was done and that Redis holds as pending, else None.

        Redis has lost the answer, or the command too, and its caller has asked again.
        """
        answer = self._answers.get(command.request_id)
        if answer is None or command.answer is not None or command.request_id in self._uncommitted:
            return None
        return replace(answer, number=command.number)

    def note_done(self, answer: Answer) -> None:
        """Note what the next checkpoint will contain."""
        self.newest = max(self.newest, answer.number)
        self._answers[answer.request_id] = self._uncommitted[answer.request_id] = answer
        while len(self._answers) > _REMEMBERED:
            del self._answers[next(iter(self._answers))]

    def uncommitted(self, checkpoint_id: str) -> tuple[Answer, ...]:
        """Return what the checkpoint of that id contains first."""
        return tuple(_within(answer, checkpoint_id) for answer in self._uncommitted.values())

    def committed(self, checkpoint_id: str) -> None:
        """Note that the checkpoint counts."""
        for request_id, answer in self._uncommitted.items():
            self._answers[request_id] = _within(answer, checkpoint_id)
        self._uncommitted.clear()


def _within(answer: Answer, checkpoint_id: str) -> Answer:
    return answer if answer.checkpoint_id else replace(answer, checkpoint_id=checkpoint_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoints:
    """Makes the checkpoints of a run; used by the loop's thread.

    Its fields are the parts with state to store.

    sections: `progress.sections` of the settings. keep_best: make a checkpoint whenever an evaluation is
    asked for.
    """

    run: str
    sections: dict[str, str]
    keep_best: bool
    checkpointer: Checkpointer
    algorithm: Algorithm
    ledger: Ledger
    position: FeedPosition
    lease: LeaseKeeper
    evaluation: Evaluation
    episodes: Episodes
    staleness: Staleness
    clock: TrainingClock
    publisher: Publisher
    recording: RecordingWriter | None
    commands: CommandRecord
    quarantine: Quarantine

    def consumed(self, size: int) -> None:
        """Note that entries of `size` payload bytes were consumed; 0 where they were not the log's."""
        self.checkpointer.consumed(size)

    @property
    def due(self) -> bool:
        """Return whether it is time for a checkpoint.

        It is when the interval is over, an operator asked, the log fills up, or the best checkpoint may be
        one of this update.
        """
        return self.checkpointer.due(self.lease.renewal) or (
            self.keep_best and self.evaluation.lacks_checkpoint(self.algorithm.updates)
        )

    def save(self) -> None:
        """Make a committed checkpoint of the run as it is now."""
        if self.recording is not None:
            self.recording.sync()
        self.checkpointer.spare(*self.evaluation.checkpoints())
        # First: every report up to its position is in the evaluation's state, which is taken after it.
        episodes = self.episodes.state()
        evaluation, best = self.evaluation.state()
        self.checkpointer.save(
            self.algorithm,
            self._progress(episodes, evaluation),
            {BEST: bytes_tensor(best)},
            answers=self.commands.uncommitted,
        )
        self.commands.committed(self.checkpointer.last_id)
        if self.keep_best:
            self.evaluation.kept_as(self.checkpointer.last_id, self.algorithm.updates)
            # This one may be the best by now, and there may be none after it.
            self.checkpointer.spare(*self.evaluation.checkpoints())

    def save_named(self, name: str, command: str, named: NamedCheckpoints) -> None:
        """Keep the run as it is now under a name; the newest checkpoint is not moved by it.

        command: id of what asks for it. Raises as `NamedCheckpoints.keep` does.
        """
        episodes = self.episodes.state()
        evaluation, _ = self.evaluation.state()
        state = self.algorithm.state()
        progress = self._progress(episodes, evaluation).to_json() | {"numbers": state.numbers}
        named.keep(name, command, state.tensors, progress)

    def _progress(self, episodes: dict[str, Any], evaluation: dict[str, Any]) -> Progress:
        return Progress(
            run=self.run,
            sections=self.sections,
            position=self.ledger.position,
            round=self.position.round,
            updates=self.algorithm.updates,
            training_seconds=self.clock.seconds(),
            publications=self.publisher.count,
            totals=self.ledger.totals(),
            episodes=episodes,
            staleness=self.staleness.state(),
            evaluation=evaluation,
            recorded=self.position.recorded,
            restored_from=self.position.restored_from,
            commands=self.commands.state(),
            quarantine=self.quarantine.state(),
            log=self.lease.known(),
        )
