"""The learner's loop: the one place where everything it does can be read in order.

    wait for a batch → update → book → publish and settle → checkpoint when due → evaluate when promising
    at the end: evaluate the last weights, or restore the best ones → checkpoint

Between two updates it follows what operators want (pause, stop, commands) and what other threads
met (a re-opened log, an error). It waits for the feed, never for Redis on the usual path: weights go out
through the publisher. In lock-step it publishes itself, and every round ends with a publication.
On a crash nothing is lost but the updates since the last commit, which the next process makes again.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.config.settings import LearnerSection
from penstock.learner.algorithms.algorithm import Algorithm, Settles, Update
from penstock.learner.algorithms.shared.containment import EMPTY
from penstock.learner.evaluation.evaluation import Evaluation
from penstock.learner.feed.log_batch import LogBatch
from penstock.learner.feed.source import Feed, FeedEnded
from penstock.learner.ledger import Drop
from penstock.learner.process.bookkeeping import Bookkeeping
from penstock.learner.process.closing import Closing
from penstock.learner.process.commands.command_follower import CommandFollower
from penstock.learner.process.ending import Ending, Outcome
from penstock.learner.process.interruptions import Interruptions
from penstock.learner.process.non_finite import NonFiniteUpdates
from penstock.learner.process.run_checkpoints import RunCheckpoints
from penstock.learner.process.stall import StallWatch
from penstock.learner.publish.weight_offers import WeightOffers
from penstock.learner.ranks.leading import Ranks
from penstock.learner.reporting.ledger_gauges import show_ledger
from penstock.learner.reporting.recorder import ProgressSnapshot, Recorder
from penstock.learner.reporting.training_clock import TrainingClock
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint

_TAKE_S: Final = 0.1

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """`run` once. snapshot: where the run is, as the recorder writes it. episodes: of training, so far."""

    section: LearnerSection
    algorithm: Algorithm
    feed: Feed
    ranks: Ranks
    books: Bookkeeping
    offers: WeightOffers
    evaluation: Evaluation
    checkpoints: RunCheckpoints
    commands: CommandFollower
    closing: Closing
    interruptions: Interruptions
    stall: StallWatch
    non_finite: NonFiniteUpdates
    recorder: Recorder
    clock: TrainingClock
    snapshot: Callable[[], ProgressSnapshot]
    episodes: Callable[[], int]
    _waited_since: float = field(init=False, default_factory=time.perf_counter)
    _is_fed: bool = field(init=False, default=True)
    _stalled: str = field(init=False, default="")

    def run(self) -> Outcome:
        """Learn until done, stopped or drained; leaves a committed checkpoint."""
        ending = self._learn()
        self.clock.stop()
        word = self.algorithm.rejection if ending is Ending.REJECTED else ending.value
        log.info("learning ended", extra={"why": word, "env_steps": self.books.ledger.env_steps})
        self.stall.suspend()
        restored = self.closing.close(ending)
        self.checkpoints.save()
        self.recorder.write(self.snapshot, now=True)
        return Outcome(ending=ending, word=word, restored=restored, stalled=self._stalled)

    def _learn(self) -> Ending:
        while True:
            self.interruptions.check()
            self._show_ledger()
            ending = self._ending()
            if ending is not None:
                return ending
            self.offers.publish_again()
            self.commands.follow()
            if self.checkpoints.due:
                self.checkpoints.save()
            if self.interruptions.is_paused:
                self._pause()
                continue
            self.stall.expect()
            failpoint("loop.waiting", self.books.ledger.position)
            log_batch = self._take()
            if log_batch is not None:
                self._consume(log_batch)
            self.recorder.write(self.snapshot)

    def _ending(self) -> Ending | None:
        if self.interruptions.is_draining:
            return Ending.DRAINED
        if self.interruptions.is_stopping:
            return Ending.STOPPED
        if self.section.stop_at_target and self.evaluation.solved is not None:
            return Ending.TARGET
        if self.evaluation.hopeless:
            return Ending.NO_IMPROVEMENT
        if self.algorithm.has_rejected:
            return Ending.REJECTED
        self._stalled = self.stall.find()
        if self._stalled:
            return Ending.STALLED
        total_steps = self.section.total_steps
        if total_steps is not None and self.books.ledger.env_steps >= total_steps:
            return Ending.STEPS
        total_updates = self.section.total_updates
        if total_updates is not None and self.algorithm.updates >= total_updates:
            return Ending.UPDATES
        total_episodes = self.section.total_episodes
        if total_episodes is not None and self.episodes() >= total_episodes:
            return Ending.EPISODES
        total_seconds = self.section.total_seconds
        if total_seconds is not None and self.clock.seconds() >= total_seconds:
            return Ending.SECONDS
        return None if self._is_fed else Ending.RECORDING

    def _pause(self) -> None:
        self.stall.suspend()
        failpoint("pause.waiting")
        self.interruptions.wait()
        self._waited_since = time.perf_counter()

    def _take(self) -> LogBatch | None:
        """Return a batch, if there is one soon.

        The metric counts each short wait: a learner without any batch starves most.
        """
        began = time.perf_counter()
        log_batch = None
        try:
            log_batch = self.feed.take(_TAKE_S)
        except FeedEnded:
            self._is_fed = False
        metrics.LEARNER_WAIT_SECONDS.inc(time.perf_counter() - began)
        return log_batch

    def _consume(self, log_batch: LogBatch) -> None:
        if log_batch.event is not None:
            self.commands.repeat(log_batch)
            return
        if self.books.position.is_before_restore(log_batch):
            # Read ahead before the restore; every rank has its part of it.
            self.ranks.skip()
            self.feed.skipped()
            log_batch = log_batch.as_dropped(Drop.RESTORED)
        self.clock.start(log_batch.created_us)
        updates, arrived = self.algorithm.updates, time.perf_counter()
        update = self._update(log_batch)
        wait_s, compute_s = arrived - self._waited_since, time.perf_counter() - arrived
        self.books.book(log_batch, update, updates)
        self.commands.booked(log_batch)
        self.offers.after(update)
        if self.non_finite.too_many:
            self.checkpoints.save()
            self._show_ledger()
            self.non_finite.give_up()
        if log_batch.batch is not None:
            values = update.metrics if update is not None else {}
            self.recorder.updated(log_batch, values, update=updates, wait_s=wait_s, compute_s=compute_s)
            self.offers.publisher.observe_generations(log_batch.versions)
        if update is not None and update.applied and (update.gradient_steps or update.collects):
            self.stall.note_update()
        self._waited_since = time.perf_counter()

    def _update(self, log_batch: LogBatch) -> Update | None:
        if log_batch.batch is None:
            return None
        failpoint("update.before", log_batch.last)
        if self.algorithm.settles is Settles.ON_INSERT:
            # Actors go on while gradient steps are made; a crash sets the settled position back.
            self.offers.settle(log_batch.last)
        progress = self.books.ledger.fraction_of(self.section.total_steps)
        batch = replace(log_batch.batch, is_flushed=bool(log_batch.flush))
        self.ranks.begin_update(progress, is_flushed=batch.is_flushed)
        update = self.algorithm.update(batch, progress=progress)
        self.ranks.agree(self.algorithm, update)
        failpoint("update.after", log_batch.last)
        if update.applied:
            self.non_finite.end_row()
            metrics.UPDATES.inc()
            metrics.TRAINED_STEPS.inc(update.steps)
            return update
        metrics.UPDATES_SKIPPED.labels(update.reason).inc()
        self.feed.skipped()
        if update.reason != EMPTY:
            self.non_finite.note(log_batch, update, self.algorithm.updates)
        return update

    def _show_ledger(self) -> None:
        show_ledger(self.books.ledger, self.interruptions.lease.renewal)
