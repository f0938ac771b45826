"""The learner of a run, from its lease to its last checkpoint, in the order in which it happens.

    open    lease → checkpoint chosen → algorithm restored → log opened → parts made
    run     threads started, then step after step, then close
    step    take a batch → update → book → publish or settle; a checkpoint and commands when they are due
    close   evaluate the last weights, or restore the best → checkpoint → final policy and account

The main thread waits for the feed and, on the usual path, never for Redis: other threads read the log,
publish, renew the lease, read reports and register versions. In lock-step the main thread publishes, and
every round ends with a publication. A crash loses only the updates since the last commit, which the next
process makes again.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Lease
from penstock.config.settings import ConfigurationError, Settings
from penstock.learner import failures
from penstock.learner.algorithms.algorithm import EMPTY, AlgorithmState, Settles, Update
from penstock.learner.checkpoint.checkpointer import Beginning, Checkpointer, choose
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import (
    BEST,
    CheckpointStore,
    NamedCheckpoints,
    bytes_tensor,
    tensor_bytes,
)
from penstock.learner.commands import CommandFollower, CommandRecord
from penstock.learner.evaluation import EpisodeLog, Episodes, Evaluation, Result
from penstock.learner.feed.log_feed import LogBatch, LogFeed, OwnPayloads
from penstock.learner.feed.recorded_feed import FeedEnded, RecordedFeed
from penstock.learner.feed.recording import DESCRIPTION, RecordingWriter
from penstock.learner.lease import LeaseKeeper, fenced, take
from penstock.learner.ledger import Drop, Progress, check_same, sections
from penstock.learner.model import Model, check_memory
from penstock.learner.publish.kept_versions import KeptVersions, write_specification
from penstock.learner.publish.publisher import PendingPublication, Publisher, PublishInterval
from penstock.learner.ranks.roles import Ranks
from penstock.learner.recorder import (
    Recorder,
    Staleness,
    TrainingClock,
    describe,
    leave_account,
    make_tracking,
    show_ledger,
    snapshot,
)
from penstock.policy import weights
from penstock.protocol.messages import RunState
from penstock.protocol.refusal import Refused
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.exit import RunFailed
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health
from penstock.runtime.retry import Interrupted

_TAKE_S: Final = 0.1
_WAIT_S: Final = 0.1
_JOIN_S: Final = 2.0

log = logging.getLogger(__name__)


class Ending(StrEnum):
    """Why learning ends."""

    TARGET = "target"
    STEPS = "steps"
    UPDATES = "updates"
    EPISODES = "episodes"
    SECONDS = "seconds"
    NO_IMPROVEMENT = "no_improvement"
    STOPPED = "stopped"
    DRAINED = "drained"
    STALLED = "stalled"
    REJECTED = "rejected"
    """The algorithm's own validation rejects the policy."""
    RECORDING = "recording"
    """The recording is at its end."""

    @property
    def finished(self) -> bool:
        """Return whether the run has ended, and not only this process."""
        return self not in {Ending.STOPPED, Ending.DRAINED, Ending.STALLED}


_LAST_COUNTS: Final = {Ending.STEPS, Ending.UPDATES, Ending.EPISODES, Ending.SECONDS, Ending.RECORDING}
"""Endings after which the last weights are evaluated."""


class Learner:
    """Rank 0 of the learner of a run: call `open`, then `run` once, in the same thread.

    model: `open` restores it in place. run_dir: with the checkpoints. ranks: the other ranks.
    health: turns red when the run makes no progress. draining: set when the process shall end.
    """

    def __init__(
        self,
        settings: Settings,
        model: Model,
        run_dir: Path,
        *,
        ranks: Ranks,
        health: Health,
        draining: threading.Event,
    ) -> None:
        self.settings, self.model, self.algorithm, self.run_dir = settings, model, model.algorithm, run_dir
        self.ranks, self.health, self.draining = ranks, health, draining
        self.sections = sections(settings)
        self.named = NamedCheckpoints(run_dir)
        self._threads, self._reopened = ThreadGroup(), threading.Event()
        self.stop = self._threads.stop
        self._is_fed, self._stalled = True, ""
        self._holds_back = self._owes_first = False
        self._offered_steps = 0

    # ---- before learning

    def open(self, connect: Callable[[], LearnerLog], resumption: ResumeOptions, *, is_held: bool) -> None:
        """Take the lease, restore the algorithm and open the log; waits for Redis and for the lease.

        A crash in between leaves nothing, or a lease that the next process takes over. connect: called once.
        resumption: the checkpoint to resume from. is_held: whether this process holds the run's folder.

        Raises Interrupted when the process shall end, ConfigurationError where another learner holds the run
        or a checkpoint does not fit, Fatal where there is nothing to begin from or another has taken over.
        """
        settings, model = self.settings, self.model
        self.learner_log, self._resumption = connect(), resumption
        check_memory(settings, model.weight_bytes, self.learner_log.max_memory_bytes())
        lease = take(self.learner_log, settings, self.run_dir, self.draining, is_held=is_held)
        store = CheckpointStore(
            self.run_dir / "checkpoints",
            settings.learner.keep_checkpoints,
            compress=settings.learner.checkpoint_compression == "lz4",
        )
        beginning = choose(lease, store, resumption)
        self._restore(beginning)
        write_specification(self.run_dir, model.specification)
        self._open_log(lease, beginning)
        self._make_parts(beginning, store)

    def _restore(self, beginning: Beginning) -> None:
        if beginning.checkpoint is None or beginning.progress is None:
            return
        check_same(self.settings.run, beginning.progress.sections, self.sections)
        tensors = {name: tensor for name, tensor in beginning.checkpoint.tensors.items() if name != BEST}
        try:
            self.algorithm.load(AlgorithmState(tensors=tensors, numbers=beginning.progress.numbers))
        except ValueError as error:
            raise ConfigurationError(
                f"checkpoint {beginning.checkpoint.id} does not fit the settings ({error}); "
                "resume with the `algorithm` and `policy` that the run was begun with"
            ) from error

    def _open_log(self, lease: Lease, beginning: Beginning) -> None:
        state, position = None, beginning.ledger.position
        if beginning.progress is not None and beginning.progress.log is not None:
            # The checkpoint holds the log as it was before its own commit.
            known = beginning.progress.log
            state = replace(known, commits=(*known.commits, beginning.lineage[-1]))
        if lease.closed and not lease.fresh:
            log.warning("Redis was restarted: opening the log again")
        try:
            specification = self.model.specification.encode()
            self.learner_log.start(specification, self.model.pacing, resume=state, position=position)
        except Refused as error:
            raise fenced(error) from error
        failpoint("log.opened", position)

    def _make_parts(self, beginning: Beginning, store: CheckpointStore) -> None:
        """Make the parts of the learner; none of their threads runs yet."""
        settings, model, learner_log, run_dir = self.settings, self.model, self.learner_log, self.run_dir
        progress = beginning.progress or Progress(run="", sections={})
        self.ledger = beginning.ledger
        self.clock = TrainingClock(progress.training_seconds)
        if progress.quarantine:
            model.quarantine.restore(progress.quarantine)
        self.lease = LeaseKeeper(
            learner_log,
            settings.learner.lease_ttl_s,
            stop=self.stop,
            quarantine=model.quarantine,
            on_reopened=self._reopened.set,
            description=partial(describe, self),
        )
        self._make_evaluation(beginning, progress, store)
        self.algorithm.is_stopping = self._is_ending_early
        begun_at = beginning.checkpoint.id if beginning.checkpoint is not None else ""
        self.commands = CommandFollower(self, CommandRecord.from_state(progress.commands, begun_at))
        self.recording = self._make_recording(progress)
        self.feed = self._make_feed()
        self.publisher = Publisher(
            learner_log,
            self.lease,
            model.quarantine,
            self.evaluation.note_published,
            PublishInterval(settings.learner, learner_log.fetched_versions),
            self.stop,
            self.kept.published,
            count=progress.publications,
        )
        env_steps = self.ledger.env_steps
        tracking = make_tracking(settings, run_dir, first_step=env_steps)
        self.recorder = Recorder(run_dir, Staleness(progress.staleness), env_steps, tracking)
        self.checkpoints = Checkpointer(
            store,
            learner_log,
            self.lease,
            self.ledger,
            self.algorithm,
            lineage=beginning.lineage,
            lineage_path=run_dir / "lineage.jsonl",
            interval_s=settings.learner.checkpoint_interval_s,
            room=model.room,
        )
        self._watch = failures.UpdateWatch(self)
        self._catch_up_through = beginning.catch_up_through
        self._waited_since = time.perf_counter()

    def _make_evaluation(self, beginning: Beginning, progress: Progress, store: CheckpointStore) -> None:
        settings, checkpoint = self.settings, beginning.checkpoint
        self.kept = KeptVersions(self, progress)
        self.evaluation = Evaluation(
            settings.evaluation, self.model.target, stop_at_target=settings.learner.stop_at_target
        )
        self.episodes = Episodes(
            self.learner_log,
            self.lease,
            self.evaluation,
            self.stop,
            self.kept.evaluated,
            EpisodeLog(self.run_dir) if settings.learner.episode_log else None,
        )
        if checkpoint is not None and progress.evaluation:
            best = checkpoint.tensors.get(BEST)
            blob = b"" if best is None else tensor_bytes(best)
            self.evaluation.restore(progress.evaluation, blob, store.ids())
            if best is not None and self.evaluation.best is not None:
                # The process that measured it may have died before the registry heard of it.
                self.kept.evaluated(self.evaluation.best)
        if progress.episodes:
            self.episodes.restore(progress.episodes)

    def _make_recording(self, progress: Progress) -> RecordingWriter | None:
        section, folder = self.settings.learner, self.settings.learner.record
        if folder is None:
            return None
        if self._resumption.resume and (folder / DESCRIPTION).exists():
            command = self.commands.record.newest
            return RecordingWriter.go_on(folder, progress.position, section.record_max_bytes, command)
        return RecordingWriter.begin(folder, self.model.specification, "learner", section.record_max_bytes)

    def _make_feed(self) -> LogFeed | RecordedFeed:
        settings, model = self.settings, self.model
        self._payloads = OwnPayloads(self.learner_log, settings, model)
        if model.recording is not None:
            recorded = RecordedFeed(
                model.recording,
                self.algorithm,
                seed=settings.seed,
                device=model.device,
                prefetch=settings.learner.prefetch_batches,
                taken=self.ledger.recorded,
                stop=self.stop,
            )
            recorded.hold_out()
            return recorded
        return LogFeed(self, self.ranks.payloads(self._payloads))

    # ---- learning

    def run(self) -> None:
        """Learn until the end; leaves a committed checkpoint, the final policy and `learner.json`.

        Raises RunFailed at the very end if no update was made for `learner.stall_timeout_s`.
        """
        try:
            self._start()
            while (ending := self.step()) is None:
                pass
            self.close(ending)
        except Interrupted:
            # An error of another thread, if there is one, is the cause.
            self._threads.check()
            raise
        finally:
            self._threads.join(_JOIN_S)
        self._threads.check()
        self.learner_log.release()
        self.learner_log.close()
        if self._stalled:
            raise RunFailed(self._stalled)

    def _start(self) -> None:
        threads = self._threads
        threads.start("lease", self.lease.run, self.lease.wake)
        self._payloads.reload(self.lease, self.algorithm, self.ledger.position)
        threads.start("publisher", self.publisher.run, self.publisher.wake)
        self.kept.begin()
        self._publish_first()
        self.ranks.start(self.algorithm)
        self.commands.begin(went_back=self._resumption.resume and self._resumption.best)
        threads.start("feed", self.feed.run)
        threads.start("episodes", self.episodes.run)
        threads.start("versions", self.kept.run, self.kept.wake)
        self.health.watch(failures.UPDATE, self.settings.learner.stall_timeout_s)
        metrics.STALENESS_SETTING.set(self.algorithm.staleness)
        self.health.set_ready(True)

    def step(self) -> Ending | None:
        """Do what is due, then train one batch if there is one soon; returns why learning ends, if so."""
        self._threads.check()
        show_ledger(self.ledger, self.lease.renewal)
        ending = self._ending()
        if ending is not None:
            return ending
        self._publish_again()
        self.commands.follow()
        # The weights that were sent to be evaluated may become the best: a checkpoint must hold them.
        lacks_best = self.settings.learner.keep_best and self.evaluation.lacks_checkpoint(
            self.algorithm.updates
        )
        if lacks_best or self.checkpoints.due(self.lease.renewal):
            self.checkpoint()
        if self.lease.renewal.desired is RunState.PAUSED:
            self._pause()
            return None
        self.health.expect(failures.UPDATE, "")
        failpoint("loop.waiting", self.ledger.position)
        log_batch = self._take()
        if log_batch is not None:
            self._consume(log_batch)
        self.recorder.write(partial(snapshot, self))
        return None

    def _ending(self) -> Ending | None:
        section = self.settings.learner
        if self.draining.is_set():
            return Ending.DRAINED
        if self.lease.renewal.desired is RunState.STOPPING:
            return Ending.STOPPED
        if section.stop_at_target and self.evaluation.solved is not None:
            return Ending.TARGET
        if self.evaluation.is_out_of_patience:
            return Ending.NO_IMPROVEMENT
        if self.algorithm.has_rejected:
            return Ending.REJECTED
        self._stalled = self._watch.stall()
        if self._stalled:
            return Ending.STALLED
        limits = (
            (Ending.STEPS, section.total_steps, self.ledger.env_steps),
            (Ending.UPDATES, section.total_updates, self.algorithm.updates),
            (Ending.EPISODES, section.total_episodes, self.episodes.count),
            (Ending.SECONDS, section.total_seconds, self.clock.seconds()),
        )
        reached = (ending for ending, most, count in limits if most is not None and count >= most)
        return next(reached, None if self._is_fed else Ending.RECORDING)

    def _pause(self) -> None:
        self.health.suspend(failures.UPDATE)
        failpoint("pause.waiting")
        self.draining.wait(_WAIT_S)
        self._waited_since = time.perf_counter()

    def _take(self) -> LogBatch | None:
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
        if any(version < self.ledger.restored_from for version in log_batch.versions):
            # It was read ahead before the restore, and every rank has its part of it.
            self.ranks.skip()
            self.feed.skipped()
            log_batch = log_batch.as_dropped(Drop.RESTORED)
        self.clock.start(log_batch.created_us)
        updates, arrived = self.algorithm.updates, time.perf_counter()
        update = self._update(log_batch)
        wait_s, compute_s = arrived - self._waited_since, time.perf_counter() - arrived
        self._book(log_batch, update, updates)
        self.commands.booked(log_batch)
        self._publish_after(update)
        if self._watch.is_hopeless:
            self.checkpoint()
            show_ledger(self.ledger, self.lease.renewal)
            self._watch.give_up()
        if log_batch.batch is not None:
            values = update.metrics if update is not None else {}
            self.recorder.updated(log_batch, values, update=updates, wait_s=wait_s, compute_s=compute_s)
            self.publisher.observe_generations(log_batch.versions)
        if update is not None and update.applied and (update.gradient_steps or update.collects):
            self._watch.note_update()
        self._waited_since = time.perf_counter()

    def _update(self, log_batch: LogBatch) -> Update | None:
        if log_batch.batch is None:
            return None
        failpoint("update.before", log_batch.last)
        if self.algorithm.settles is Settles.ON_INSERT:
            # Actors generate while gradient steps are made; a crash sets the settled position back.
            self._settle(log_batch.last)
        progress = self.ledger.fraction_of(self.settings.learner.total_steps)
        batch = replace(log_batch.batch, is_flushed=bool(log_batch.flush))
        self.ranks.begin_update(progress, is_flushed=batch.is_flushed)
        update = self.algorithm.update(batch, progress=progress)
        self.ranks.agree(self.algorithm, update)
        failpoint("update.after", log_batch.last)
        if update.applied:
            self._watch.note_applied()
            metrics.UPDATES.inc()
            metrics.TRAINED_STEPS.inc(update.steps)
            return update
        metrics.UPDATES_SKIPPED.labels(update.reason).inc()
        self.feed.skipped()
        if update.reason != EMPTY:
            self._watch.note_failed(log_batch, update, self.algorithm.updates)
        return update

    # ---- the outcome of each batch

    def _book(self, log_batch: LogBatch, update: Update | None, updates: int) -> None:
        failed, left_out = failures.failed_fragments(log_batch, update)
        failures.suspect_senders(self.model.quarantine, log_batch, failed)
        dropped = dict(log_batch.dropped) | failed
        self.ledger.book(
            log_batch.last,
            trained=[number for number in log_batch.trained if number not in failed],
            dropped=dropped,
            steps=log_batch.steps - left_out,
            origins=log_batch.origins,
        )
        if log_batch.round is not None:
            self.ledger.round = log_batch.round + 1
        self.ledger.recorded = log_batch.recorded
        self._watch.note_dropped(dropped.values())
        if self.recording is not None:
            self.recording.consumed(
                log_batch.fragments,
                position=log_batch.last,
                update=updates,
                of_round=log_batch.round,
                dropped={number: reason.value for number, reason in log_batch.dropped.items()},
                flush=log_batch.flush,
            )
        self.checkpoints.consumed(log_batch.size)

    # ---- weights out

    def _publish_first(self) -> None:
        """Publish the weights that this process begins with, as a new version, which opens the first round.

        Where the log holds experience of newer weights, the restored weights first catch up with it: what an
        actor generated with the old ones would be stale at its turn, after all that.
        """
        if self._is_catching_up():
            log.info("catching up before publishing", extra={"through": self._catch_up_through})
            self._owes_first = True
        else:
            self._publish()

    def _publish_after(self, update: Update | None) -> None:
        """Publish the weights, or settle the position, after an update; None: the batch was dropped."""
        if self._is_catching_up():
            self._settle(self.ledger.position)
            return
        section = self.settings.learner
        applied = update is not None and update.applied and update.publish
        evaluate = applied and self.evaluation.wanted(
            self.episodes.recent(),
            update=self.algorithm.updates,
            env_steps=self.ledger.env_steps,
            ended=self.episodes.count,
            length=self.episodes.means()[1],
        )
        is_due = self.ledger.env_steps - self._offered_steps >= section.publish_interval_steps
        # The first version is due even after stale fragments: old weights would only bring more of them.
        publishes = self._owes_first or (applied and (evaluate or is_due))
        self._owes_first = False
        self._holds_back = not publishes and (self._holds_back or (update is not None and update.applied))
        if self.algorithm.lock_step or (evaluate and section.keep_best):
            # In this thread: the evaluated weights must be those that the checkpoint will hold.
            self._publish(evaluate=evaluate)
        elif publishes:
            self.publisher.offer(self._offer(evaluate=evaluate))
        else:
            self._settle(self.ledger.position)

    def publish_restored(self) -> int:
        self._holds_back = self._owes_first = False
        self._publish()
        return self.publisher.latest.version

    def _publish_again(self) -> None:
        """Publish again after a restart of Redis, which may have lost weights and their evaluation."""
        if self._reopened.is_set():
            self._reopened.clear()
            self._publish(evaluate=self.evaluation.pending)

    def _publish(self, *, evaluate: bool = False) -> None:
        self.publisher.publish(self._offer(evaluate=evaluate))

    def _settle(self, position: int) -> None:
        """Give actors credit for what was consumed up to a log entry, without new weights."""
        self.publisher.offer(PendingPublication(settled=position))

    def _is_catching_up(self) -> bool:
        return self.ledger.position < self._catch_up_through

    def _offer(self, *, evaluate: bool) -> PendingPublication:
        (module,) = self.algorithm.published_modules().values()
        self._offered_steps = self.ledger.env_steps
        return PendingPublication(
            settled=self.ledger.position,
            weights=weights.snapshot(module),
            update=self.algorithm.updates,
            scalars=self.algorithm.scalars(self.ledger.fraction_of(self.settings.learner.total_steps)),
            evaluate=evaluate,
            round=self.ledger.round if self.algorithm.lock_step else None,
            env_steps=self.ledger.env_steps,
            at_s=self.clock.seconds(),
        )

    # ---- checkpoints

    def checkpoint(self) -> None:
        if self.recording is not None:
            self.recording.sync()
        self.checkpoints.spare(*self.evaluation.checkpoints())
        progress, best = self._progress()
        record = self.commands.record
        self.checkpoints.save(progress, {BEST: bytes_tensor(best)}, answers=record.uncommitted)
        record.committed(self.checkpoints.last_id)
        if self.settings.learner.keep_best:
            self.evaluation.kept_as(self.checkpoints.last_id, self.algorithm.updates)
            # This checkpoint may be of the best evaluation by now, and it may be the last one.
            self.checkpoints.spare(*self.evaluation.checkpoints())

    def name_checkpoint(self, name: str, command: str) -> None:
        """Keep the current state of the run under a name, apart from the checkpoints to resume from.

        command: id of the operator's command. Raises as `NamedCheckpoints.keep` does.
        """
        progress, _ = self._progress()
        state = self.algorithm.state()
        self.named.keep(name, command, state.tensors, progress.to_json() | {"numbers": state.numbers})

    def _progress(self) -> tuple[Progress, bytes]:
        # First, so that the evaluation's state, taken later, contains all reports up to this position.
        episodes = self.episodes.state()
        evaluation, best = self.evaluation.state()
        progress = Progress(
            run=self.settings.run,
            sections=self.sections,
            position=self.ledger.position,
            round=self.ledger.round,
            updates=self.algorithm.updates,
            training_seconds=self.clock.seconds(),
            publications=self.publisher.count,
            totals=self.ledger.totals(),
            episodes=episodes,
            staleness=self.recorder.staleness.state(),
            evaluation=evaluation,
            recorded=self.ledger.recorded,
            restored_from=self.ledger.restored_from,
            commands=self.commands.record.state(),
            quarantine=self.model.quarantine.state(),
            log=self.learner_log.snapshot(),
        )
        return progress, best

    # ---- the end

    def close(self, ending: Ending) -> None:
        """End learning: leaves a committed checkpoint, the final policy, its version and `learner.json`.

        A drain or a stop ends the wait for evaluations.
        """
        self.clock.stop()
        word = self.algorithm.rejection if ending is Ending.REJECTED else ending.value
        log.info("learning ended", extra={"why": word, "env_steps": self.ledger.env_steps})
        self.health.suspend(failures.UPDATE)
        if self._holds_back:
            self.publisher.offer(self._offer(evaluate=False))
        self.publisher.flush()
        if ending in _LAST_COUNTS:
            self._evaluate_last()
        # A later result would be reported for the run, while the final policy is another one.
        self.evaluation.abandon()
        keeps_best = self.settings.evaluation.patience is not None or ending is Ending.REJECTED
        restored = None
        if ending.finished and ending is not Ending.TARGET and keeps_best:
            restored = self._restore_best()
        self.checkpoint()
        self.recorder.write(partial(snapshot, self), now=True)
        leave_account(self, word, restored, finished=ending.finished)

    def _evaluate_last(self) -> None:
        """Wait for the pending evaluation, then for that of the last weights if they had none."""
        self._await_evaluation()
        if not self._is_ending_early() and self.evaluation.request(self.algorithm.updates):
            self._publish(evaluate=True)
            if self.settings.learner.keep_best:
                self.checkpoint()
            self._await_evaluation()

    def _await_evaluation(self) -> None:
        timeout_s = self.settings.evaluation.timeout_s
        deadline = time.monotonic() + timeout_s
        if self.evaluation.pending and not self._is_ending_early():
            log.info("waiting for an evaluation actor to play the weights", extra={"at_most_s": timeout_s})
        while self.evaluation.pending and not self._is_ending_early():
            self._threads.check()
            self._publish_again()
            if time.monotonic() > deadline:
                log.error(
                    "no evaluation came back in time: is an evaluation actor running?",
                    extra={"timeout_s": timeout_s},
                )
                abandoned = self.evaluation.abandon()
                if abandoned is not None:
                    self.publisher.withdraw(abandoned)
            self.draining.wait(_WAIT_S)

    def _is_ending_early(self) -> bool:
        return self.draining.is_set() or self.lease.renewal.desired is RunState.STOPPING

    def _restore_best(self) -> Result | None:
        """Publish the weights of the best evaluation again, as a new version, unless they are the newest.

        The policy gets these weights, and a run that is resumed continues from them. Optimiser and counters
        stay as they are.
        """
        best = self.evaluation.best
        if best is None or best.candidate.version == self.publisher.latest.version:
            return None
        (module,) = self.algorithm.published_modules().values()
        weights.load_into(module, best.candidate.blob)
        offer = replace(self._offer(evaluate=False), update=best.candidate.update, round=None)
        self.publisher.publish(offer)
        words = {"of": best.candidate.version, "mean": best.mean, "as": self.publisher.latest.version}
        log.info("the best version was restored", extra=words)
        return best
