"""The parts of a learner that has the lease, made and connected in the order in which they need one another.

Nothing runs before all of them are there: `LearnerRun` starts and ends their threads.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Final

import torch

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import LogEntry
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.batch import assemble as assemble_batch
from penstock.learner.checkpoint.checkpointer import Checkpointer
from penstock.learner.checkpoint.store import BEST, NamedCheckpoints, tensor_bytes
from penstock.learner.evaluation import Episodes, Evaluation
from penstock.learner.feed.log_feed import FeedStart, LogFeed
from penstock.learner.feed.payloads import OwnPayloads, opened
from penstock.learner.feed.source import Feed, FeedPosition
from penstock.learner.lease import LeaseKeeper
from penstock.learner.process.account import Account
from penstock.learner.process.command_follower import CommandFollower, Restoration
from penstock.learner.process.loop import (
    Bookkeeping,
    Closing,
    Interruptions,
    Loop,
    NonFiniteUpdates,
    StallWatch,
)
from penstock.learner.process.opening import OpenedRun
from penstock.learner.process.run_checkpoints import CommandRecord, RunCheckpoints
from penstock.learner.progress import Progress, sections
from penstock.learner.publish.kept_versions import KeptVersions
from penstock.learner.publish.publisher import Publisher, PublishInterval, WeightOffers
from penstock.learner.ranks.leading import Ranks
from penstock.learner.recording.recorded_feed import RecordedFeed
from penstock.learner.recording.writer import RecordingWriter
from penstock.learner.reporting.recorder import EpisodeLog, Recorder, TrainingClock
from penstock.learner.thread_group import ThreadGroup
from penstock.protocol.schema import FragmentSchema, Ranges
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health
from penstock.runtime.retry import Interrupted

# ---- Read again what an algorithm retained.

_READ: Final = 64

log = logging.getLogger(__name__)


def reload(
    learner_log: LearnerLog,
    lease: LeaseKeeper,
    algorithm: Algorithm,
    *,
    run_name: str,
    schema: FragmentSchema,
    ranges: Ranges,
    device: torch.device,
    position: int,
) -> None:
    """Give the algorithm back what lies in the log from `retain_from` up to `position`.

    It does nothing where the algorithm retains nothing.

    Raises ValueError where an entry is not what it was when it entered.
    """
    first = algorithm.retain_from()
    if first is None:
        return
    after = first - 1
    while after < position:
        failpoint("recall.reading", after)
        found = lease.patiently(lambda: learner_log.read(after, _READ, 0))  # noqa: B023 - called before the next turn
        entries = [entry for entry in found if entry.number <= position]
        if not entries:
            break
        after = entries[-1].number
        _give(algorithm, learner_log, entries, run_name, schema, ranges, device)
    lost = algorithm.end_reload()
    words = {"first": first, "position": position, "lost": lost}
    if lost:
        log.error("replay comes back smaller: the log does not hold all of it any more", extra=words)
    else:
        log.info("replay was read again", extra=words)


def _give(
    algorithm: Algorithm,
    learner_log: LearnerLog,
    entries: list[LogEntry],
    run_name: str,
    schema: FragmentSchema,
    ranges: Ranges,
    device: torch.device,
) -> None:
    payloads = learner_log.fetch([entry.number for entry in entries], [entry.size for entry in entries])
    loaded, places = [], []
    for entry, payload in zip(entries, payloads, strict=True):
        if entry.header is None or payload is None:
            continue
        try:
            loaded.append(opened(entry.header, payload, schema, ranges, run_name))
        except ValueError:
            continue  # Booked `invalid` when it was read the first time: it is not in replay.
        places.append((entry.number, entry.size))
    if loaded:
        algorithm.reload(assemble_batch(loaded, device, places))


# ---- A learner that runs: its threads are started, the loop learns, everything is ended.

_JOIN_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRun:
    """The parts that have threads of their own, and the loop that needs them. `run` once."""

    opened: OpenedRun
    ranks: Ranks
    health: Health
    threads: ThreadGroup
    lease: LeaseKeeper
    feed: Feed
    publisher: Publisher
    offers: WeightOffers
    episodes: Episodes
    kept: KeptVersions
    commands: CommandFollower
    stall: StallWatch
    loop: Loop
    account: Account

    def run(self) -> None:
        """Learn until the end; leaves a committed checkpoint, the final policy and `learner.json`.

        Raises RunFailed, after all that, when no update was made for `learner.stall_timeout_s`.
        """
        try:
            self._start()
            outcome = self.loop.run()
            self.account.close(outcome)
        except Interrupted:
            # Another thread has failed while this one waited: its error is the cause.
            self.threads.check()
            raise
        finally:
            self.threads.join(_JOIN_S)
        self.threads.check()
        self.opened.learner_log.release()
        self.opened.learner_log.close()
        if outcome.stalled:
            raise RunFailed(outcome.stalled)

    def _start(self) -> None:
        opened, algorithm = self.opened, self.opened.model.algorithm
        self.threads.start("lease", self.lease.run, self.lease.wake)
        reload(
            opened.learner_log,
            self.lease,
            algorithm,
            run_name=opened.settings.run,
            schema=opened.model.specification.schema,
            ranges=opened.model.ranges,
            device=opened.model.device,
            position=opened.beginning.ledger.position,
        )
        self.threads.start("publisher", self.publisher.run, self.publisher.wake)
        self.kept.begin()
        self.offers.publish_first()
        self.ranks.start(algorithm)
        self.commands.begin(went_back=opened.beginning.went_back)
        self.threads.start("feed", self.feed.run)
        self.threads.start("episodes", self.episodes.run)
        self.threads.start("versions", self.kept.run, self.kept.wake)
        self.stall.begin()
        metrics.STALENESS_SETTING.set(algorithm.staleness)
        self.health.set_ready(True)


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
