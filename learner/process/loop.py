"""The learner's loop: the one place where everything it does can be read in order.

    wait for a batch → update → book → publish and settle → checkpoint when due → evaluate when promising
    at the end: evaluate the last weights, or restore the best ones → checkpoint

Between two updates it follows what operators want (pause, stop, commands) and what other threads
met (a re-opened log, an error). It waits for the feed, never for Redis on the usual path: weights go out
through the publisher. In lock-step it publishes itself, and every round ends with a publication.
On a crash nothing is lost but the updates since the last commit, which the next process makes again.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, NoReturn

from penstock.broker.log.replies import SessionRow, Status
from penstock.config.settings import EvaluationSection, LearnerSection
from penstock.learner.algorithms.algorithm import Algorithm, Settles, Update
from penstock.learner.algorithms.shared.containment import EMPTY
from penstock.learner.evaluation import Evaluation, Result
from penstock.learner.feed.source import Feed, FeedEnded, FeedPosition, LogBatch
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Drop, Ledger
from penstock.learner.probe import Quarantine
from penstock.learner.process.command_follower import CommandFollower
from penstock.learner.process.run_checkpoints import RunCheckpoints
from penstock.learner.publish.publisher import Publisher, WeightOffers
from penstock.learner.ranks.leading import Ranks
from penstock.learner.recording.writer import Consumed, RecordingWriter
from penstock.learner.reporting.recorder import (
    ProgressSnapshot,
    Recorder,
    TrainingClock,
    keep_evidence,
    show_ledger,
)
from penstock.learner.thread_group import ThreadGroup
from penstock.protocol.messages import Role, RunState
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health

# ---- Whether a run still makes updates, and why not, in words that name what a person must look at.

UPDATE: Final = "update"
"""What health watches: an update, not the mere arrival of experience that is dropped."""


@dataclass(slots=True, kw_only=True, eq=False)
class StallWatch:
    """Health's watch on updates. status: asks Redis who is there. timeout_s: `learner.stall_timeout_s`."""

    health: Health
    status: Callable[[], Status]
    timeout_s: float
    _dropped: Counter[str] = field(init=False, default_factory=Counter)

    def begin(self) -> None:
        """Watch from now on."""
        self.health.watch(UPDATE, self.timeout_s)

    def expect(self) -> None:
        """An update is waited for."""
        self.health.expect(UPDATE, "")

    def suspend(self) -> None:
        """No update is waited for until `expect`."""
        self.health.suspend(UPDATE)

    def note_dropped(self, reasons: Iterable[Drop]) -> None:
        """Fragments were dropped: one of the causes that `find` may name."""
        for reason in reasons:
            self._dropped[reason.value] += 1

    def note_update(self) -> None:
        """An update was made and applied."""
        self.health.progress(UPDATE)
        self._dropped.clear()

    def find(self) -> str:
        """Why no update was made for `timeout_s`, which turns health red; "" as long as that is not so."""
        if not self.health.has_stalled(UPDATE):
            return ""
        text = cause(self.status(), self._dropped, self.timeout_s)
        self.health.fail(text)
        return text


def cause(status: Status, dropped: Mapping[str, int], limit_s: float) -> str:
    """One line. dropped: fragments by reason since the last update."""
    return f"no update for {limit_s:g} s (learner.stall_timeout_s): {_reason(status, dropped)}"


def _reason(status: Status, dropped: Mapping[str, int]) -> str:
    actors = [row for row in status.sessions if row.role is Role.ROLLOUT]
    if not actors:
        return (
            "all actors are gone, no rollout worker has an open session; their logs say why"
            if status.log_head
            else "no rollout worker has come; start one, or wait longer (learner.stall_timeout_s)"
        )
    found = []
    if dropped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        found.append(f"all that arrived was dropped ({counts})")
    if all(row.applied_version < status.latest.version for row in actors):
        found.append(f"no actor acts with the newest weights: {_lag(actors, status.latest.version)}")
    if not found:
        found.append(
            f"{len(actors)} rollout workers are connected and do not fill a batch; "
            f"{status.gauges.log_entries} entries are in the log"
        )
    return "; ".join(found)


def _lag(actors: Sequence[SessionRow], newest: int) -> str:
    worst = min(actors, key=lambda row: row.applied_version)
    return (
        f"{worst.actor_id} acts with version {worst.applied_version}, version {newest} is published; "
        "they do not reach it, or its environment stands still"
    )


# ---- What became of each batch, written down.

_BOOKED_AS: Final = {"nan": Drop.NAN, "implausible": Drop.INVALID, "error": Drop.INVALID}
"""By the reason for which an update fails."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """Used by the loop's thread. recording: None where nothing is recorded."""

    ledger: Ledger
    position: FeedPosition
    recording: RecordingWriter | None
    checkpoints: RunCheckpoints
    stall: StallWatch
    quarantine: Quarantine

    def book(self, log_batch: LogBatch, update: Update | None, updates: int) -> None:
        """Book a batch that was consumed.

        update: None where all of it was dropped. updates: made before it.
        """
        failed = _failed(log_batch, update)
        self._suspect(log_batch, failed)
        trained = [number for number in log_batch.trained if number not in failed]
        dropped = dict(log_batch.dropped) | failed
        steps = log_batch.steps - _left_out(log_batch, update)
        self.ledger.book(
            log_batch.last, trained=trained, dropped=dropped, steps=steps, origins=log_batch.origins
        )
        self.stall.note_dropped(dropped.values())
        self._record(log_batch, updates)
        self.checkpoints.consumed(log_batch.size)
        self.position.advance(log_batch)

    def _suspect(self, log_batch: LogBatch, failed: Mapping[int, Drop]) -> None:
        """Tell who sent the fragments that made an update fail.

        A whole batch has no culprit, unless one session sent all of it.
        """
        if len(failed) == len(log_batch.trained) > 1:
            if len(log_batch.sessions) == 1:
                (session,) = log_batch.sessions
                self.quarantine.suspect(session, f"all of its batch up to log entry {log_batch.last} fails")
            return
        for number, reason in failed.items():
            origin = log_batch.origins.get(number)
            session = 0 if origin is None else origin.session
            words = {"number": number, "session": session, "reason": reason.value}
            log.error("a fragment was left out: the update fails with it", extra=words)
            if session:
                self.quarantine.suspect(session, f"log entry {number} makes updates fail")

    def _record(self, log_batch: LogBatch, updates: int) -> None:
        if self.recording is None:
            return
        dropped = {number: reason.value for number, reason in log_batch.dropped.items()}
        self.recording.consumed(
            Consumed(
                position=log_batch.last,
                update=updates,
                round=log_batch.round,
                dropped=dropped,
                fragments=log_batch.fragments,
                flush=log_batch.flush,
            )
        )


def _failed(log_batch: LogBatch, update: Update | None) -> dict[int, Drop]:
    """Fragments of the batch that were not trained, with the reason."""
    if update is None:
        return {}
    if update.reason in _BOOKED_AS:
        return dict.fromkeys(log_batch.trained, _BOOKED_AS[update.reason])
    in_batch = set(log_batch.trained)
    return {number: _BOOKED_AS[why] for number, why in update.culprits.items() if number in in_batch}


def _left_out(log_batch: LogBatch, update: Update | None) -> int:
    """Steps of the batch that were not trained; a recording's fragments have no numbers to tell it by."""
    if update is None:
        return 0
    return log_batch.steps if update.reason in _BOOKED_AS else update.left_out


# ---- How a learner's loop may end.


class Ending(StrEnum):
    """Why the loop ended."""

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
    """The algorithm's own validation rejects what was learned."""
    RECORDING = "recording"
    """The recording that was learned from is at its end."""

    @property
    def finished(self) -> bool:
        """Whether the run is done, and not only this process."""
        return self in {
            Ending.TARGET,
            Ending.STEPS,
            Ending.UPDATES,
            Ending.EPISODES,
            Ending.SECONDS,
            Ending.NO_IMPROVEMENT,
            Ending.REJECTED,
            Ending.RECORDING,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the loop leaves.

    word: what the account says it ended by; of a rejection, the algorithm's own word.
    restored: the evaluation whose weights are the newest version again; None: those of the last update are.
    stalled: why no more updates were made; "" unless that has ended the loop.
    """

    ending: Ending
    word: str
    restored: Result | None
    stalled: str


# ---- What may interrupt the loop between two updates: an error of another thread, an operator, a drain.

_WAIT_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """lease: its newest renewal tells what operators want. draining: set when the process is asked to end."""

    threads: ThreadGroup
    lease: LeaseKeeper
    draining: threading.Event

    def check(self) -> None:
        """Raise the first error of any thread."""
        self.threads.check()

    @property
    def is_draining(self) -> bool:
        """Whether this process, though not the run, is asked to end."""
        return self.draining.is_set()

    @property
    def is_stopping(self) -> bool:
        """Whether an operator has stopped the run."""
        return self.lease.renewal.desired is RunState.STOPPING

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused the run."""
        return self.lease.renewal.desired is RunState.PAUSED

    def wait(self) -> None:
        """Wait a moment before looking again; a drain ends the wait."""
        self.draining.wait(_WAIT_S)


# ---- What follows the last update.


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Used by the loop's thread, once. A drain or a stop ends the waiting."""

    section: EvaluationSection
    algorithm: Algorithm
    evaluation: Evaluation
    offers: WeightOffers
    publisher: Publisher
    checkpoints: RunCheckpoints
    interruptions: Interruptions

    def close(self, ending: Ending) -> Result | None:
        """Return the evaluation whose weights are the newest version again.

        None: the weights of the last update are the newest.
        """
        self.offers.finish()
        if ending in {Ending.STEPS, Ending.UPDATES, Ending.EPISODES, Ending.SECONDS, Ending.RECORDING}:
            self._evaluate_last()
        # What came later would be told of as the run's result, and the final policy would be another one.
        self.evaluation.abandon()
        keeps_best = self.section.patience is not None or ending is Ending.REJECTED
        if ending.finished and ending is not Ending.TARGET and keeps_best:
            return self._restore_best()
        return None

    def _evaluate_last(self) -> None:
        """Wait for what is under way, then for the last weights where they were not evaluated yet."""
        self._await_evaluation()
        if not self._is_ending_early() and self.evaluation.ask(self.algorithm.updates):
            self.offers.publish_for_evaluation()
            if self.checkpoints.keep_best:
                self.checkpoints.save()
            self._await_evaluation()

    def _await_evaluation(self) -> None:
        """Wait until the result is there, at most for `evaluation.timeout_s` from now."""
        timeout_s = self.section.timeout_s
        deadline = time.monotonic() + timeout_s
        if self.evaluation.pending and not self._is_ending_early():
            log.info("waiting for an evaluation actor to play the weights", extra={"at_most_s": timeout_s})
        while self.evaluation.pending and not self._is_ending_early():
            self.interruptions.check()
            self.offers.publish_again()
            if time.monotonic() > deadline:
                log.error(
                    "no evaluation came back in time: is an evaluation actor running?",
                    extra={"timeout_s": timeout_s},
                )
                abandoned = self.evaluation.abandon()
                if abandoned is not None:
                    self.publisher.withdraw(abandoned)
            self.interruptions.wait()

    def _is_ending_early(self) -> bool:
        return self.interruptions.is_draining or self.interruptions.is_stopping

    def _restore_best(self) -> Result | None:
        """Publish the weights of the best evaluation again, unless they are the newest.

        Optimiser and counters stay where they are, so that a run that is resumed goes on from these weights.
        """
        best = self.evaluation.best
        if best is None or best.candidate.version == self.publisher.latest.version:
            return None
        self.offers.publish_best(best.candidate)
        words = {"of": best.candidate.version, "mean": best.mean, "as": self.publisher.latest.version}
        log.info("the best version was restored", extra=words)
        return best


# ---- Updates that were undone: each leaves its batch as evidence, several in a row end the run.

_MAX_IN_A_ROW: Final = 3
_WHAT: Final = {
    "nan": "were not finite",
    "implausible": "had a |log π/μ| above algorithm.max_log_ratio",
    "error": "raised an exception",
}
_REMEDY: Final = {
    "nan": "lower algorithm.learning_rate or look at the environment's rewards",
    "implausible": "look whether actors act with the weights they name, or raise algorithm.max_log_ratio",
    "error": "the learner's log has it",
}
LAST_READ_S: Final = 20.0
"""Longer than the 15 s after which the shipped Prometheus looks again."""


@dataclass(slots=True, kw_only=True, eq=False)
class NonFiniteUpdates:
    """Counts them. folder: where evidence is kept. status: the run as Redis has it."""

    folder: Path
    status: Callable[[], Status]
    health: Health
    draining: threading.Event
    _in_a_row: int = field(init=False, default=0)
    _sessions: set[int] = field(init=False, default_factory=set)
    _evidence: str = field(init=False, default="")
    _reason: str = field(init=False, default="nan")

    def note(self, log_batch: LogBatch, update: Update, count: int) -> None:
        """Keep the batch of an update that was undone. count: updates applied before it."""
        self._in_a_row += 1
        self._sessions |= log_batch.sessions
        self._evidence = keep_evidence(self.folder, log_batch, update, count)
        self._reason = update.reason
        words = {"evidence": self._evidence, "last": log_batch.last, "reason": update.reason}
        log.error("update skipped", extra=words, exc_info=update.error)

    def end_row(self) -> None:
        """An update was applied."""
        self._in_a_row = 0
        self._sessions.clear()

    @property
    def too_many(self) -> bool:
        """Whether going on is hopeless: batches of as many sessions have failed, or of all that there are."""
        if self._in_a_row < _MAX_IN_A_ROW:
            return False
        senders = [row for row in self.status().sessions if row.role is not Role.EVALUATION]
        return len(self._sessions) >= min(_MAX_IN_A_ROW, len(senders))

    def give_up(self) -> NoReturn:
        """End the run rather than this process: started again it would do the same. Raises RunFailed.

        Call it when a checkpoint holds what was not finite as dropped, so that a run which is resumed with
        other settings does not meet it again. All of it may have happened within a second: wait for a
        collector of metrics.
        """
        self.health.await_readers(LAST_READ_S, self.draining)
        raise RunFailed(
            f"{_MAX_IN_A_ROW} updates in a row {_WHAT[self._reason]}; evidence in {self._evidence}; "
            f"{_REMEDY[self._reason]}"
        )


_TAKE_S: Final = 0.1


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
