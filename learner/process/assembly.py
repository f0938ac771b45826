"""The parts of a learner that has the lease, made and connected in the order in which they need one another.

Nothing runs before all of them are there: `LearnerRun` starts and ends their threads.
"""

import threading
from typing import Final

from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.checkpoint.named_checkpoints import NamedCheckpoints
from penstock.learner.checkpoint.store import BEST, tensor_bytes
from penstock.learner.evaluation.evaluation import Evaluation
from penstock.learner.evaluation.reported_episodes import Episodes
from penstock.learner.feed.log_feed import FeedStart, LogFeed
from penstock.learner.feed.payloads import OwnPayloads
from penstock.learner.feed.source import Feed, FeedPosition
from penstock.learner.lease import LeaseKeeper
from penstock.learner.process.account import Account
from penstock.learner.process.bookkeeping import Bookkeeping
from penstock.learner.process.closing import Closing
from penstock.learner.process.commands.command_follower import CommandFollower
from penstock.learner.process.commands.command_record import CommandRecord
from penstock.learner.process.commands.restoration import Restoration
from penstock.learner.process.interruptions import Interruptions
from penstock.learner.process.learner_run import LearnerRun
from penstock.learner.process.loop import Loop
from penstock.learner.process.non_finite import NonFiniteUpdates
from penstock.learner.process.opening import OpenedRun
from penstock.learner.process.run_checkpoints import RunCheckpoints
from penstock.learner.process.stall import StallWatch
from penstock.learner.progress import Progress, sections
from penstock.learner.publish.kept_versions import KeptVersions
from penstock.learner.publish.publish_interval import PublishInterval
from penstock.learner.publish.publisher import Publisher
from penstock.learner.publish.weight_offers import WeightOffers
from penstock.learner.ranks.leading import Ranks
from penstock.learner.recording.recorded_feed import RecordedFeed
from penstock.learner.recording.writer import RecordingWriter
from penstock.learner.reporting.episode_log import EpisodeLog
from penstock.learner.reporting.recorder import Recorder
from penstock.learner.reporting.training_clock import TrainingClock
from penstock.learner.thread_group import ThreadGroup
from penstock.runtime.health import Health

_JOIN_S: Final = 2.0


def assemble(opened: OpenedRun, *, health: Health, ranks: Ranks, draining: threading.Event) -> LearnerRun:
    """Return the learner of an opened run, ready to run.

    health: turns red when the run makes no progress. ranks: those that compute with this one. draining: set
    when the process is asked to end.
    """
    return _Assembly(opened, health, ranks, draining).learner_run()


class _Assembly:
    """The parts while they are connected."""

    def __init__(self, opened: OpenedRun, health: Health, ranks: Ranks, draining: threading.Event) -> None:
        self._base, self._health, self._ranks, self._draining = opened, health, ranks, draining
        beginning = self._base.beginning
        self._progress = beginning.progress or Progress(run="", sections={})
        self._ledger = beginning.ledger
        self._position = FeedPosition(
            round=self._progress.round,
            recorded=self._progress.recorded,
            restored_from=self._progress.restored_from,
        )
        begun_at = beginning.checkpoint.id if beginning.checkpoint is not None else ""
        self._record = CommandRecord.from_state(self._progress.commands, begun_at)
        if self._progress.quarantine:
            self._base.model.quarantine.restore(self._progress.quarantine)
        self._clock = TrainingClock(self._progress.training_seconds)
        self._threads = ThreadGroup()
        self._reopened = threading.Event()
        self._lease = LeaseKeeper(
            self._base.learner_log,
            self._base.settings.learner.lease_ttl_s,
            stop=self._threads.stop,
            quarantine=self._base.model.quarantine,
            on_reopened=self._reopened.set,
            description=self._describe,
        )
        self._make_evaluation()
        self._make_feed()
        self._make_offers()
        self._make_account()
        self._make_commands()
        self._stall = StallWatch(
            health=self._health,
            status=self._base.learner_log.status,
            timeout_s=self._base.settings.learner.stall_timeout_s,
        )

    def learner_run(self) -> LearnerRun:
        """Return the learner with all of its parts."""
        return LearnerRun(
            opened=self._base,
            ranks=self._ranks,
            health=self._health,
            threads=self._threads,
            lease=self._lease,
            feed=self._feed,
            publisher=self._publisher,
            offers=self._offers,
            episodes=self._episodes,
            kept=self._kept,
            commands=self._commands,
            stall=self._stall,
            loop=self._make_loop(),
            account=self._account,
        )

    def _describe(self) -> str:
        return self._account.describe()

    # ---- evaluation, and the versions that it finds

    def _make_evaluation(self) -> None:
        base, checkpoint = self._base, self._base.beginning.checkpoint
        self._kept = KeptVersions.of_run(
            base.settings,
            base.run_dir,
            self._progress,
            base.learner_log.kept,
            self._lease,
            self._threads.stop,
        )
        self._evaluation = Evaluation(
            base.settings.evaluation, base.model.target, stop_at_target=base.settings.learner.stop_at_target
        )
        self._episodes = Episodes(
            base.learner_log,
            self._lease,
            self._evaluation,
            self._threads.stop,
            self._kept.evaluated,
            EpisodeLog(base.run_dir) if base.settings.learner.episode_log else None,
        )
        if checkpoint is not None and self._progress.evaluation:
            best = checkpoint.tensors.get(BEST)
            blob = b"" if best is None else tensor_bytes(best)
            self._evaluation.restore(self._progress.evaluation, blob, base.store.ids())
            if best is not None and self._evaluation.best is not None:
                # The process that measured it may have died before the registry heard of it.
                self._kept.evaluated(self._evaluation.best)
        if self._progress.episodes:
            self._episodes.restore(self._progress.episodes)

    # ---- experience in

    def _make_feed(self) -> None:
        base, specification = self._base, self._base.model.specification
        resumed_at = self._progress.position if base.beginning.resumed else None
        self._recording = RecordingWriter.of_run(
            base.settings.learner, specification, resumed_at, self._record.newest
        )
        self._feed: Feed
        if base.model.recording is not None:
            self._feed = RecordedFeed(
                base.model.recording,
                base.model.algorithm,
                seed=base.settings.seed,
                device=base.model.device,
                prefetch=base.settings.learner.prefetch_batches,
                taken=self._position.recorded,
                stop=self._threads.stop,
            )
            self._feed.hold_out()
            return
        own = OwnPayloads.of_run(
            base.learner_log,
            base.settings,
            specification.schema,
            base.model.ranges,
            base.model.device,
            keep_fragments=base.settings.learner.record is not None,
        )
        self._feed = LogFeed(
            base.learner_log,
            self._lease,
            base.model.algorithm,
            base.model.quarantine,
            self._ranks.payloads(own),
            budget=base.model.pacing.budget,
            prefetch=base.settings.learner.prefetch_batches,
            start=FeedStart(
                position=self._ledger.position,
                updates=base.model.algorithm.updates,
                round=self._position.round,
                restored_from=self._position.restored_from,
            ),
            stop=self._threads.stop,
        )

    # ---- weights out

    def _make_offers(self) -> None:
        base = self._base
        self._publisher = Publisher(
            base.learner_log,
            self._lease,
            base.model.quarantine,
            self._evaluation.requested,
            PublishInterval(base.settings.learner, base.learner_log.fetched_versions),
            self._threads.stop,
            self._kept.published,
            published=self._progress.publications,
        )
        self._offers = WeightOffers(
            section=base.settings.learner,
            algorithm=base.model.algorithm,
            publisher=self._publisher,
            evaluation=self._evaluation,
            episodes=self._episodes,
            ledger=self._ledger,
            position=self._position,
            clock=self._clock,
            reopened=self._reopened,
            catch_up_through=base.beginning.catch_up_through,
        )

    # ---- what is kept and told

    def _make_account(self) -> None:
        base, settings = self._base, self._base.settings
        self._recorder = Recorder.of_run(
            settings, base.run_dir, self._ledger.env_steps, self._progress.staleness
        )
        checkpointer = Checkpointer(
            base.store,
            base.learner_log,
            self._lease,
            self._ledger,
            lineage=base.beginning.lineage,
            lineage_path=base.run_dir / "lineage.jsonl",
            interval_s=settings.learner.checkpoint_interval_s,
            room=base.model.room,
            retain_from=base.model.algorithm.retain_from,
        )
        self._checkpoints = RunCheckpoints(
            run=settings.run,
            sections=sections(settings),
            keep_best=settings.learner.keep_best,
            checkpointer=checkpointer,
            algorithm=base.model.algorithm,
            ledger=self._ledger,
            position=self._position,
            lease=self._lease,
            evaluation=self._evaluation,
            episodes=self._episodes,
            staleness=self._recorder.staleness,
            clock=self._clock,
            publisher=self._publisher,
            recording=self._recording,
            commands=self._record,
            quarantine=base.model.quarantine,
        )
        self._account = Account(
            run_dir=base.run_dir,
            model=base.model,
            learner_log=base.learner_log,
            lease=self._lease,
            ledger=self._ledger,
            position=self._position,
            clock=self._clock,
            publisher=self._publisher,
            checkpointer=checkpointer,
            evaluation=self._evaluation,
            episodes=self._episodes,
            kept=self._kept,
            recorder=self._recorder,
            recording=self._recording,
        )

    # ---- what operators ask for

    def _make_commands(self) -> None:
        base, named = self._base, NamedCheckpoints(self._base.run_dir)
        self._commands = CommandFollower(
            learner_log=base.learner_log,
            lease=self._lease,
            record=self._record,
            checkpoints=self._checkpoints,
            named=named,
            restoration=Restoration(
                run=base.settings.run,
                sections=sections(base.settings),
                named=named,
                algorithm=base.model.algorithm,
                ranks=self._ranks,
                feed=self._feed,
                position=self._position,
                offers=self._offers,
                learner_log=base.learner_log,
            ),
            position=self._position,
            feed=self._feed,
            recording=self._recording,
        )

    # ---- the loop

    def _make_loop(self) -> Loop:
        base, algorithm = self._base, self._base.model.algorithm
        interruptions = Interruptions(threads=self._threads, lease=self._lease, draining=self._draining)
        return Loop(
            section=base.settings.learner,
            algorithm=algorithm,
            feed=self._feed,
            ranks=self._ranks,
            books=Bookkeeping(
                ledger=self._ledger,
                position=self._position,
                recording=self._recording,
                checkpoints=self._checkpoints,
                stall=self._stall,
                quarantine=base.model.quarantine,
            ),
            offers=self._offers,
            evaluation=self._evaluation,
            checkpoints=self._checkpoints,
            commands=self._commands,
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
                folder=base.run_dir / "evidence",
                status=base.learner_log.status,
                health=self._health,
                draining=self._draining,
            ),
            recorder=self._recorder,
            clock=self._clock,
            episodes=lambda: self._episodes.count,
            snapshot=self._account.snapshot,
        )
