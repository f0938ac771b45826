"""A learner that has the lease: its parts, tied together; its threads; its final account.

Threads: the loop (this one), feed, publisher, lease, episodes, versions. They share no state but what each part
guards itself. The first error of any of them ends all; nothing is written after a refused renewal.
"""

import json
import logging
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from broker.log.learner_log import LearnerLog
from learner.checkpoint.checkpointer import Keeper
from learner.checkpoint.resume import Beginning
from learner.checkpoint.store import BEST, CheckpointStore, tensor_bytes
from learner.evaluation.evaluation import Evaluation, Result, scores_json
from learner.evaluation.reported_episodes import Episodes
from learner.feed.feed import Feed, FeedStart
from learner.feed.payloads import OwnPayloads
from learner.feed.upload import upload_to
from learner.lease import LeaseKeeper
from learner.ledger import Balance
from learner.model.model import Model
from learner.process.loop import UPDATE, Loop
from learner.process.parts import Ending, Parts, Plan
from learner.process.replay_reload import recall
from learner.progress import Progress, sections
from learner.publish.final_policy import FinalPolicy, write_final
from learner.publish.kept_versions import KeptVersions
from learner.publish.publisher import Publisher
from learner.publish.registry_sync import Shelf
from learner.publish.version_candidate import last, lineage_of
from learner.ranks.leading import Ranks
from learner.recording.recorded_feed import RecordedFeed
from learner.recording.recording_index import DESCRIPTION
from learner.recording.writer import RecordingWriter
from learner.reporting.recorder import Recorder, Staleness, ledger_json
from learner.reporting.trackers.tracker import Place, make_tracking
from learner.reporting.training_clock import TrainingClock
from learner.thread_group import Crew
from penstock.config.settings import Settings
from penstock.policy import weights
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.runtime.health import Health
from penstock.runtime.retry import Interrupted

_JOIN_S: Final = 2.0
_BALANCE_ATTEMPTS: Final = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """What a process is built on: the lease is held, the algorithm restored, the log open."""

    settings: Settings
    model: Model
    learner_log: LearnerLog
    store: CheckpointStore
    beginning: Beginning
    run_dir: Path
    health: Health
    draining: threading.Event
    ranks: Ranks
    catch_up_through: int
    resumed: bool = False


class Process:
    """`run` once."""

    def __init__(self, foundation: Foundation) -> None:
        self._base = foundation
        self._crew = Crew()
        self._reopened = threading.Event()
        progress = foundation.beginning.progress or Progress(run="", sections={})
        self._lease = LeaseKeeper(
            foundation.learner_log,
            foundation.settings.learner.lease_ttl_s,
            stop=self._crew.stop,
            quarantine=foundation.model.quarantine,
            on_reopened=self._reopened.set,
            description=self._describe,
        )
        self._kept = self._make_kept(progress)
        self._parts = self._make_parts(progress)
        self._loop = Loop(self._parts, self._plan(), progress.round)
        metrics.STALENESS_SETTING.set(foundation.settings.algorithm.begun_lag)

    def run(self) -> None:
        """Learn until the end; leaves a committed checkpoint, the final policy and `learner.json`.

        Raises RunFailed, after all that, when no update was made for `learner.stall_timeout_s`.
        """
        try:
            self._start()
            self._account(self._loop.run())
        except Interrupted:
            # Another thread has failed while this one waited: its error is the cause.
            self._crew.check()
            raise
        finally:
            self._crew.join(_JOIN_S)
        self._crew.check()
        self._base.learner_log.release()
        self._base.learner_log.close()
        if self._loop.stalled:
            raise RunFailed(self._loop.stalled)

    def _start(self) -> None:
        parts = self._parts
        self._crew.start("lease", parts.lease.run, parts.lease.wake)
        recall(
            self._base.learner_log,
            parts.lease,
            self._base.model.algorithm,
            run_name=self._base.settings.run,
            schema=self._base.model.specification.schema,
            device=self._base.model.device,
            position=parts.ledger.position,
        )
        self._crew.start("publisher", parts.publisher.run, parts.publisher.wake)
        self._kept.begin()
        self._loop.publish_first()
        parts.ranks.start(parts.algorithm)
        self._crew.start("feed", parts.feed.run)
        self._crew.start("episodes", parts.episodes.run)
        self._crew.start("versions", self._kept.run, self._kept.wake)
        parts.health.watch(UPDATE, self._base.settings.learner.stall_timeout_s)
        parts.health.set_ready(True)

    def _describe(self) -> str:
        """What Status shows of the learner."""
        ledger = self._parts.ledger
        books = {"trained": ledger.trained, "dropped": dict(ledger.dropped)}
        return json.dumps(asdict(self._loop.moment()) | {"ledger": books})

    # ---- parts

    def _make_parts(self, progress: Progress) -> Parts:
        base, crew, ledger = self._base, self._crew, self._base.beginning.ledger
        settings = base.settings
        evaluation = Evaluation(
            settings.evaluation, base.model.target, stop_at_target=settings.learner.stop_at_target
        )
        if base.beginning.checkpoint is not None and progress.evaluation:
            best = base.beginning.checkpoint.tensors.get(BEST)
            evaluation.restore(progress.evaluation, b"" if best is None else tensor_bytes(best))
            if best is not None and evaluation.best is not None:
                # Whoever measured it may have died before the registry heard of it.
                self._kept.evaluated(evaluation.best)
        episodes = Episodes(base.learner_log, self._lease, evaluation, crew.stop, self._kept.evaluated)
        if progress.episodes:
            episodes.restore(progress.episodes)
        return Parts(
            algorithm=base.model.algorithm,
            feed=self._make_feed(progress),
            ranks=base.ranks,
            tee=self._make_tee(),
            publisher=Publisher(
                base.learner_log,
                self._lease,
                base.model.quarantine,
                evaluation.requested,
                crew.stop,
                self._kept.published,
            ),
            lease=self._lease,
            ledger=ledger,
            keeper=self._make_keeper(),
            evaluation=evaluation,
            episodes=episodes,
            recorder=self._make_recorder(progress),
            clock=TrainingClock(progress.training_seconds),
            crew=crew,
            health=base.health,
            draining=base.draining,
            reopened=self._reopened,
            status=base.learner_log.status,
        )

    def _make_recorder(self, progress: Progress) -> Recorder:
        base, first_step = self._base, self._base.beginning.ledger.env_steps
        place = Place(settings=base.settings, run_dir=base.run_dir, first_step=first_step)
        tracking = make_tracking(place) if base.settings.metrics.trackers else None
        return Recorder(base.run_dir, Staleness(progress.staleness), first_step, tracking)

    def _make_feed(self, progress: Progress) -> Feed | RecordedFeed:
        base, round_ = self._base, progress.round
        if base.model.recording is not None:
            feed = RecordedFeed(
                base.model.recording,
                base.model.algorithm,
                seed=base.settings.seed,
                device=base.model.device,
                prefetch=base.settings.learner.prefetch_batches,
                taken=progress.recorded,
                stop=self._crew.stop,
            )
            feed.hold_out()
            return feed
        own = OwnPayloads(
            base.learner_log,
            run_name=base.settings.run,
            schema=base.model.specification.schema,
            upload=upload_to(base.model.device),
            take_digests=base.settings.actor.ack_journal is not None,
            keep_fragments=base.settings.learner.record is not None,
        )
        return Feed(
            base.learner_log,
            self._lease,
            base.model.algorithm,
            base.model.quarantine,
            base.ranks.payloads(own),
            budget=base.model.pacing.budget,
            prefetch=base.settings.learner.prefetch_batches,
            start=FeedStart(
                position=base.beginning.ledger.position, turn=base.model.algorithm.updates, round=round_
            ),
            stop=self._crew.stop,
        )

    def _make_tee(self) -> RecordingWriter | None:
        """Goes on where the recording of the run that is resumed was at its checkpoint."""
        base, section = self._base, self._base.settings.learner
        if section.record is None:
            return None
        if base.resumed and (section.record / DESCRIPTION).exists():
            progress = base.beginning.progress
            position = 0 if progress is None else progress.position
            return RecordingWriter.go_on(section.record, position, section.record_max_bytes)
        specification = base.model.specification
        return RecordingWriter.begin(section.record, specification, "learner", section.record_max_bytes)

    def _make_keeper(self) -> Keeper:
        base = self._base
        return Keeper(
            base.store,
            base.learner_log,
            self._lease,
            base.beginning.ledger,
            lineage=base.beginning.lineage,
            lineage_path=base.run_dir / "lineage.jsonl",
            interval_s=base.settings.learner.checkpoint_interval_s,
            room=base.model.room,
            retain_from=base.model.algorithm.retain_from,
        )

    def _make_kept(self, progress: Progress) -> KeptVersions:
        base = self._base
        lineage = lineage_of(base.settings, base.run_dir, progress)
        shelf = Shelf(base.learner_log.kept, self._lease, lineage.run, lineage.policy, base.run_dir)
        return KeptVersions(lineage, shelf, self._crew.stop)

    def _plan(self) -> Plan:
        settings = self._base.settings
        return Plan(
            run=settings.run,
            sections=sections(settings),
            total_steps=settings.learner.total_steps,
            stop_at_target=settings.learner.stop_at_target,
            keep_best=settings.learner.keep_best,
            restore_best=settings.evaluation.patience is not None,
            evaluation_timeout_s=settings.evaluation.timeout_s,
            budget=self._base.model.pacing.budget,
            evidence_dir=str(self._base.run_dir / "evidence"),
            stall_timeout_s=settings.learner.stall_timeout_s,
            catch_up_through=self._base.catch_up_through,
        )

    # ---- the account

    def _account(self, ending: Ending) -> None:
        final = self._final()
        write_final(self._base.run_dir, final)
        newest = self._parts.publisher.latest
        self._kept.finish(last(final, self._parts.evaluation, newest, ending.value))
        balance = self._balance()
        if not balance.balanced:
            log.error("the books do not balance", extra=asdict(balance))
        self._parts.recorder.finish(self._summary(ending, final, balance))
        if self._parts.tee is not None:
            self._parts.tee.close()

    def _final(self) -> FinalPolicy:
        """What solved the task where something did, else the newest weights, which may be the best ones again."""
        solved, newest = self._parts.evaluation.solved, self._parts.publisher.latest
        if solved is not None and self._loop.restored is None:
            blob, version, update = solved.candidate.blob, solved.candidate.version, solved.candidate.update
        else:
            (module,) = self._parts.algorithm.published_modules().values()
            blob, version, update = weights.encode(module), newest.version, newest.update
        return FinalPolicy(
            specification=self._base.model.specification, blob=blob, version=version, update=update
        )

    def _balance(self) -> Balance:
        """The three counts at one moment: actors may still append while the log is walked."""
        learner_log, ledger = self._base.learner_log, self._parts.ledger
        for _ in range(_BALANCE_ATTEMPTS):
            acked, lost = learner_log.acked(), learner_log.log_lost()
            residue = learner_log.residue(ledger.position)
            if (acked, lost) == (learner_log.acked(), learner_log.log_lost()):
                break
        metrics.LEDGER_RESIDENT.set(residue.entries)
        return ledger.balance(acked=acked, lost=lost + residue.lost, resident=residue.entries)

    def _summary(self, ending: Ending, final: FinalPolicy, balance: Balance) -> dict[str, Any]:
        moment, evaluation = self._loop.moment(), self._parts.evaluation
        solved, restored = evaluation.solved, self._loop.restored
        seconds = moment.training_seconds if solved is None else solved.candidate.at_s
        return {
            "run": self._base.settings.run,
            "ending": ending.value,
            "finished": ending.finished,
            "solved": solved is not None,
            "target_return": self._base.model.target,
            "mean_return": moment.mean_return,
            "evaluation": _evaluation_json(restored or solved or evaluation.last),
            "best_checkpoint": evaluation.checkpoints()[0] or None,
            "restored_from": None if restored is None else restored.candidate.version,
            "env_steps": moment.env_steps,
            "updates": moment.updates,
            "policy_version": final.version,
            "training_seconds": round(seconds, 3),
            "env_steps_per_second": round(moment.env_steps / max(moment.training_seconds, 1e-9), 1),
            "staleness": self._parts.recorder.staleness.quantiles(),
            "ledger": ledger_json(balance),
            "recording": self._recording_json(),
        }

    def _recording_json(self) -> dict[str, Any] | None:
        """What the run learned from in place of actors: its ledger, which counts what they sent, holds nothing."""
        recording = self._base.model.recording
        if recording is None:
            return None
        return {
            "folder": str(recording.folder),
            "run": recording.specification.run,
            "fragments": len(recording.fragments),
            "steps": sum(place.charge for place in recording.fragments),
            "batches_taken": self._parts.feed.taken,
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
    }
