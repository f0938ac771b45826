"""Where the run is, told while it learns, and the final account of this process, written when it ends."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.evaluation import Episodes, Evaluation, Result, base_json, scores_json
from penstock.learner.feed.source import FeedPosition
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Balance, Ledger
from penstock.learner.model.model import Model
from penstock.learner.process.loop import Outcome
from penstock.learner.publish.final_policy import FinalPolicy, name_final, write_final
from penstock.learner.publish.kept_versions import KeptVersions, last
from penstock.learner.publish.publisher import Publisher
from penstock.learner.recording.writer import RecordingWriter
from penstock.learner.reporting.recorder import ProgressSnapshot, Recorder, TrainingClock, ledger_json
from penstock.policy import weights
from penstock.runtime import metrics

_BALANCE_ATTEMPTS: Final = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The parts whose figures are told. recording: what the run writes, if it records."""

    run_dir: Path
    model: Model
    learner_log: LearnerLog
    lease: LeaseKeeper
    ledger: Ledger
    position: FeedPosition
    clock: TrainingClock
    publisher: Publisher
    checkpointer: Checkpointer
    evaluation: Evaluation
    episodes: Episodes
    kept: KeptVersions
    recorder: Recorder
    recording: RecordingWriter | None

    def snapshot(self) -> ProgressSnapshot:
        """Return where the run is; may be asked from any thread."""
        renewal = self.lease.renewal
        mean_return, episode_length = self.episodes.means()
        return ProgressSnapshot(
            training_seconds=self.clock.elapsed(),
            env_steps=self.ledger.env_steps,
            updates=self.model.algorithm.updates,
            version=self.publisher.latest.version,
            publications=self.publisher.count,
            episodes=self.episodes.count,
            mean_return=mean_return,
            episode_length=episode_length,
            publish_s=self.publisher.seconds,
            checkpoint_s=self.checkpointer.seconds,
            log_bytes=renewal.log_bytes,
            outstanding=renewal.outstanding,
            budget=self.model.pacing.budget,
            evaluated=self.evaluation.figures(),
        )

    def describe(self) -> str:
        """Return what `Status` shows of the learner, a JSON object; may be asked from any thread."""
        books = {"trained": self.ledger.trained, "dropped": dict(self.ledger.dropped)}
        return json.dumps(
            asdict(self.snapshot()) | {"ledger": books, "last_update": dict(self.recorder.last)}
        )

    def close(self, outcome: Outcome) -> None:
        """Leave the final policy, the registered version and `learner.json`."""
        final = self._final(outcome)
        write_final(self.run_dir, final)
        self.kept.finish(last(final, self.evaluation, self.publisher.latest, outcome.word))
        name_final(self.run_dir)
        balance = self._balance()
        if not balance.balanced:
            log.error("the books do not balance", extra=asdict(balance))
        self.recorder.finish(self._summary(outcome, final, balance))
        if self.recording is not None:
            self.recording.close()

    def _final(self, outcome: Outcome) -> FinalPolicy:
        """Return the weights that solved the task, or else the newest ones.

        The newest may be the best ones again.
        """
        solved, newest = self.evaluation.solved, self.publisher.latest
        if solved is not None and outcome.restored is None:
            blob, version, update = solved.candidate.blob, solved.candidate.version, solved.candidate.update
        else:
            (module,) = self.model.algorithm.published_modules().values()
            blob, version, update = weights.encode(module), newest.version, newest.update
        return FinalPolicy(specification=self.model.specification, blob=blob, version=version, update=update)

    def _balance(self) -> Balance:
        """The three counts at one moment: actors may still append while the log is walked."""
        learner_log = self.learner_log
        for _ in range(_BALANCE_ATTEMPTS):
            acked, lost = learner_log.acked(), learner_log.log_lost()
            residue = learner_log.residue(self.ledger.position)
            if (acked, lost) == (learner_log.acked(), learner_log.log_lost()):
                break
        metrics.LEDGER_RESIDENT.set(residue.entries)
        return self.ledger.balance(acked=acked, lost=lost + residue.lost, resident=residue.entries)

    def _summary(self, outcome: Outcome, final: FinalPolicy, balance: Balance) -> dict[str, Any]:
        snapshot, evaluation, seconds = self.snapshot(), self.evaluation, self.clock.seconds()
        solved, restored = evaluation.solved, outcome.restored
        return {
            "run": self.model.specification.run,
            "ending": outcome.word,
            "finished": outcome.ending.finished,
            "solved": solved is not None,
            "target_return": self.model.target,
            "mean_return": snapshot.mean_return,
            "evaluation": _evaluation_json(restored or solved or evaluation.last),
            "best_checkpoint": evaluation.checkpoints()[0] or None,
            "restored_from": None if restored is None else restored.candidate.version,
            "env_steps": snapshot.env_steps,
            "updates": snapshot.updates,
            "policy_version": final.version,
            "training_seconds": round(seconds, 3),
            "solved_at": None if solved is None else _moment_json(restored or solved),
            "env_steps_per_second": round(snapshot.env_steps / max(seconds, 1e-9), 1),
            "staleness": self.recorder.staleness.quantiles(),
            "ledger": ledger_json(balance),
            "recording": self._recording_json(),
            "findings": self.model.algorithm.findings(),
        }

    def _recording_json(self) -> dict[str, Any] | None:
        """Return what the run learned from in place of actors.

        The ledger, which counts what actors sent, is empty in such a run.
        """
        recording = self.model.recording
        if recording is None:
            return None
        return {
            "folder": str(recording.folder),
            "run": recording.specification.run,
            "fragments": len(recording.fragments),
            "steps": sum(place.charge for place in recording.fragments),
            "batches_taken": self.position.recorded,
        }


def _moment_json(solved: Result) -> dict[str, Any]:
    """When the version that reached the target was made; seconds of training."""
    candidate = solved.candidate
    return {
        "seconds": round(candidate.at_s, 3),
        "env_steps": candidate.env_steps,
        "version": candidate.version,
    }


def _evaluation_json(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "mean": result.mean,
        "std": result.std,
        "episodes": result.episodes,
        "version": result.candidate.version,
        "env_steps": result.candidate.env_steps,
        **scores_json(result),
        "base": base_json(result),
    }
