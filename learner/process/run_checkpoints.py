"""Checkpoints of a run: collects what every part must remember and has the checkpointer write it."""

from dataclasses import dataclass
from typing import Any

from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.checkpoint.named_checkpoints import NamedCheckpoints
from penstock.learner.checkpoint.store import BEST, bytes_tensor
from penstock.learner.evaluation.evaluation import Evaluation
from penstock.learner.evaluation.reported_episodes import Episodes
from penstock.learner.feed.source import FeedPosition
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Ledger
from penstock.learner.probe import Quarantine
from penstock.learner.process.commands.command_record import CommandRecord
from penstock.learner.progress import Progress
from penstock.learner.publish.publisher import Publisher
from penstock.learner.recording.writer import RecordingWriter
from penstock.learner.reporting.recorder import Staleness
from penstock.learner.reporting.training_clock import TrainingClock


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
