"""A learner that has the lease: its parts are made and connected here, its threads started and ended.

Threads: the loop (this one), feed, publisher, lease, episodes, versions. They share no state but what each
part guards itself. The first error of any of them ends all; nothing is written after a refused renewal.
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker.log.learner_log import LearnerLog
from learner.checkpoint.checkpointer import Checkpointer
from learner.checkpoint.resume import Beginning
from learner.checkpoint.run_checkpoints import RunCheckpoints
from learner.checkpoint.store import BEST, CheckpointStore, tensor_bytes
from learner.evaluation.evaluation import Evaluation
from learner.evaluation.reported_episodes import Episodes
from learner.feed.log_feed import FeedStart, LogFeed
from learner.feed.payloads import OwnPayloads
from learner.feed.source import Feed, FeedPosition
from learner.feed.upload import upload_to
from learner.lease import LeaseKeeper
from learner.model.model import Model
from learner.process.account import Account
from learner.process.bookkeeping import Bookkeeping
from learner.process.closing import Closing
from learner.process.interruptions import Interruptions
from learner.process.loop import Loop
from learner.process.non_finite import NonFiniteUpdates
from learner.process.replay_reload import reload
from learner.process.stall import StallWatch
from learner.progress import Progress, sections
from learner.publish.kept_versions import KeptVersions
from learner.publish.publisher import Publisher
from learner.publish.registry_sync import RegistrySync
from learner.publish.version_candidate import lineage_of
from learner.publish.weight_offers import WeightOffers
from learner.ranks.leading import Ranks
from learner.recording.recorded_feed import RecordedFeed
from learner.recording.recording_index import DESCRIPTION
from learner.recording.writer import RecordingWriter
from learner.reporting.recorder import Recorder, Staleness
from learner.reporting.trackers.tracker import Place, make_tracking
from learner.reporting.training_clock import TrainingClock
from learner.thread_group import ThreadGroup
from penstock.config.settings import Settings
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.runtime.health import Health
from penstock.runtime.retry import Interrupted

_JOIN_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """What a learner is built on: the lease is held, the algorithm restored, the log open."""

    settings: Settings
    model: Model
    learner_log: LearnerLog
    store: CheckpointStore
    beginning: Beginning
    run_dir: Path
    health: Health
    draining: threading.Event
    ranks: Ranks


class Learner:
    """Its parts, in the order in which they need one another. `run` once."""

    def __init__(self, foundation: Foundation) -> None:
        self._base = foundation
        beginning = foundation.beginning
        self._progress = beginning.progress or Progress(run="", sections={})
        self._ledger = beginning.ledger
        self._position = FeedPosition(round=self._progress.round, recorded=self._progress.recorded)
        self._clock = TrainingClock(self._progress.training_seconds)
        self._threads = ThreadGroup()
        self._reopened = threading.Event()
        self._lease = LeaseKeeper(
            foundation.learner_log,
            foundation.settings.learner.lease_ttl_s,
            stop=self._threads.stop,
            quarantine=foundation.model.quarantine,
            on_reopened=self._reopened.set,
            description=self._describe,
        )
        self._kept = self._make_kept()
        self._evaluation = self._make_evaluation()
        self._episodes = self._make_episodes()
        self._feed = self._make_feed()
        self._recording = self._make_recording()
        self._publisher = Publisher(
            foundation.learner_log,
            self._lease,
            foundation.model.quarantine,
            self._evaluation.requested,
            self._threads.stop,
            self._kept.published,
        )
        self._keeper = self._make_checkpointer()
        self._recorder = self._make_recorder()
        self._checkpoints = self._make_checkpoints()
        self._offers = self._make_offers()
        self._account = self._make_account()
        self._stall = StallWatch(
            health=foundation.health,
            status=foundation.learner_log.status,
            timeout_s=foundation.settings.learner.stall_timeout_s,
        )
        self._loop = self._make_loop()
        metrics.STALENESS_SETTING.set(foundation.settings.algorithm.begun_lag)

    def run(self) -> None:
        """Learn until the end; leaves a committed checkpoint, the final policy and `learner.json`.

        Raises RunFailed, after all that, when no update was made for `learner.stall_timeout_s`.
        """
        try:
            self._start()
            outcome = self._loop.run()
            self._account.close(outcome)
        except Interrupted:
            # Another thread has failed while this one waited: its error is the cause.
            self._threads.check()
            raise
        finally:
            self._threads.join(_JOIN_S)
        self._threads.check()
        self._base.learner_log.release()
        self._base.learner_log.close()
        if outcome.stalled:
            raise RunFailed(outcome.stalled)

    def _start(self) -> None:
        base, algorithm = self._base, self._base.model.algorithm
        self._threads.start("lease", self._lease.run, self._lease.wake)
        reload(
            base.learner_log,
            self._lease,
            algorithm,
            run_name=base.settings.run,
            schema=base.model.specification.schema,
            device=base.model.device,
            position=self._ledger.position,
        )
        self._threads.start("publisher", self._publisher.run, self._publisher.wake)
        self._kept.begin()
        self._offers.publish_first()
        base.ranks.start(algorithm)
        self._threads.start("feed", self._feed.run)
        self._threads.start("episodes", self._episodes.run)
        self._threads.start("versions", self._kept.run, self._kept.wake)
        self._stall.begin()
        base.health.set_ready(True)

    def _describe(self) -> str:
        return self._account.describe()

    # ---- experience in

    def _make_feed(self) -> Feed:
        base = self._base
        if base.model.recording is not None:
            feed = RecordedFeed(
                base.model.recording,
                base.model.algorithm,
                seed=base.settings.seed,
                device=base.model.device,
                prefetch=base.settings.learner.prefetch_batches,
                taken=self._position.recorded,
                stop=self._threads.stop,
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
        return LogFeed(
            base.learner_log,
            self._lease,
            base.model.algorithm,
            base.model.quarantine,
            base.ranks.payloads(own),
            budget=base.model.pacing.budget,
            prefetch=base.settings.learner.prefetch_batches,
            start=FeedStart(
                position=self._ledger.position,
                turn=base.model.algorithm.updates,
                round=self._position.round,
            ),
            stop=self._threads.stop,
        )

    def _make_recording(self) -> RecordingWriter | None:
        """Goes on where the recording of the run that is resumed was at its checkpoint."""
        base, section = self._base, self._base.settings.learner
        if section.record is None:
            return None
        if base.beginning.resumed and (section.record / DESCRIPTION).exists():
            return RecordingWriter.go_on(section.record, self._progress.position, section.record_max_bytes)
        specification = base.model.specification
        return RecordingWriter.begin(section.record, specification, "learner", section.record_max_bytes)

    # ---- weights out

    def _make_kept(self) -> KeptVersions:
        base = self._base
        lineage = lineage_of(base.settings, base.run_dir, self._progress)
        registry_sync = RegistrySync(
            base.learner_log.kept, self._lease, lineage.run, lineage.policy, base.run_dir
        )
        return KeptVersions(lineage, registry_sync, self._threads.stop)

    def _make_offers(self) -> WeightOffers:
        return WeightOffers(
            section=self._base.settings.learner,
            algorithm=self._base.model.algorithm,
            publisher=self._publisher,
            evaluation=self._evaluation,
            episodes=self._episodes,
            ledger=self._ledger,
            position=self._position,
            clock=self._clock,
            reopened=self._reopened,
            catch_up_through=self._base.beginning.catch_up_through,
        )

    # ---- evaluation

    def _make_evaluation(self) -> Evaluation:
        base, checkpoint = self._base, self._base.beginning.checkpoint
        evaluation = Evaluation(
            base.settings.evaluation, base.model.target, stop_at_target=base.settings.learner.stop_at_target
        )
        if checkpoint is not None and self._progress.evaluation:
            best = checkpoint.tensors.get(BEST)
            evaluation.restore(self._progress.evaluation, b"" if best is None else tensor_bytes(best))
            if best is not None and evaluation.best is not None:
                # The process that measured it may have died before the registry heard of it.
                self._kept.evaluated(evaluation.best)
        return evaluation

    def _make_episodes(self) -> Episodes:
        episodes = Episodes(
            self._base.learner_log, self._lease, self._evaluation, self._threads.stop, self._kept.evaluated
        )
        if self._progress.episodes:
            episodes.restore(self._progress.episodes)
        return episodes

    # ---- what is kept and told

    def _make_checkpointer(self) -> Checkpointer:
        base = self._base
        return Checkpointer(
            base.store,
            base.learner_log,
            self._lease,
            self._ledger,
            lineage=base.beginning.lineage,
            lineage_path=base.run_dir / "lineage.jsonl",
            interval_s=base.settings.learner.checkpoint_interval_s,
            room=base.model.room,
            retain_from=base.model.algorithm.retain_from,
        )

    def _make_checkpoints(self) -> RunCheckpoints:
        settings = self._base.settings
        return RunCheckpoints(
            run=settings.run,
            sections=sections(settings),
            keep_best=settings.learner.keep_best,
            checkpointer=self._keeper,
            algorithm=self._base.model.algorithm,
            ledger=self._ledger,
            position=self._position,
            lease=self._lease,
            evaluation=self._evaluation,
            episodes=self._episodes,
            staleness=self._recorder.staleness,
            clock=self._clock,
            recording=self._recording,
        )

    def _make_recorder(self) -> Recorder:
        base, first_step = self._base, self._ledger.env_steps
        place = Place(settings=base.settings, run_dir=base.run_dir, first_step=first_step)
        tracking = make_tracking(place) if base.settings.metrics.trackers else None
        return Recorder(base.run_dir, Staleness(self._progress.staleness), first_step, tracking)

    def _make_account(self) -> Account:
        return Account(
            run_dir=self._base.run_dir,
            model=self._base.model,
            learner_log=self._base.learner_log,
            lease=self._lease,
            ledger=self._ledger,
            position=self._position,
            clock=self._clock,
            publisher=self._publisher,
            checkpointer=self._keeper,
            evaluation=self._evaluation,
            episodes=self._episodes,
            kept=self._kept,
            recorder=self._recorder,
            recording=self._recording,
        )

    # ---- the loop

    def _make_loop(self) -> Loop:
        base, algorithm = self._base, self._base.model.algorithm
        interruptions = Interruptions(threads=self._threads, lease=self._lease, draining=base.draining)
        return Loop(
            section=base.settings.learner,
            algorithm=algorithm,
            feed=self._feed,
            ranks=base.ranks,
            books=Bookkeeping(
                ledger=self._ledger,
                position=self._position,
                recording=self._recording,
                checkpoints=self._checkpoints,
                stall=self._stall,
            ),
            offers=self._offers,
            evaluation=self._evaluation,
            checkpoints=self._checkpoints,
            closing=Closing(
                section=base.settings.evaluation,
                algorithm=algorithm,
                evaluation=self._evaluation,
                offers=self._offers,
                publisher=self._publisher,
                checkpoints=self._checkpoints,
                interruptions=interruptions,
            ),
            interruptions=interruptions,
            stall=self._stall,
            non_finite=NonFiniteUpdates(
                folder=base.run_dir / "evidence", health=base.health, draining=base.draining
            ),
            recorder=self._recorder,
            clock=self._clock,
            moment=self._account.moment,
        )
