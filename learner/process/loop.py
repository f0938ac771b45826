"""The learner's loop: the one place where everything it does can be read in order.

    wait for a batch → update → book → publish and settle → checkpoint when due → evaluate when promising
    at the end: evaluate the last weights, or restore the best ones → checkpoint

Between two updates it follows what operators want (pause, stop, checkpoint) and what the other threads
met (a re-opened log, an error). It waits for the feed, never for Redis on the usual path: weights go out
through the publisher. In lock-step it publishes itself, and every round ends with a publication.
On a crash nothing is lost but the updates since the last commit, which the next process makes again.
"""

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Final, NoReturn

from learner.algorithms.algorithm import Settles, Update
from learner.checkpoint.store import BEST, bytes_tensor
from learner.evaluation.evaluation import Result
from learner.feed.log_batch import Delivery
from learner.ledger import Drop
from learner.process.parts import Ending, Parts, Plan
from learner.process.stall import cause
from learner.progress import Progress
from learner.publish.publisher import Offer
from learner.recording.writer import Consumed
from learner.reporting.evidence import keep_evidence
from learner.reporting.recorder import Moment
from penstock.policy import weights
from penstock.runtime import metrics, tracing
from penstock.runtime.exit import RunFailed
from penstock.runtime.failpoint import failpoint
from penstock.wire.messages import RunState

UPDATE: Final = "update"
"""What health watches: an update, not the mere arrival of experience that is dropped."""
_TAKE_S: Final = 0.1
_MAX_NAN: Final = 3
LAST_READ_S: Final = 20.0
"""Longer than the 15 s after which the shipped Prometheus looks again."""

log = logging.getLogger(__name__)


class Loop:
    """`run` once."""

    def __init__(self, parts: Parts, plan: Plan, round_: int) -> None:
        self._parts = parts
        self._plan = plan
        self._round = round_
        self._nan_in_a_row = 0
        self._evidence = ""
        self._holds_back = False
        self._owes_first = False
        self._waited_since = time.perf_counter()
        self._dropped: Counter[str] = Counter()
        self.stalled = ""
        """Why there were no updates any more; "" unless that has ended the loop."""
        self.restored: Result | None = None
        """The evaluation whose weights are the newest version again; None: those of the last update are."""

    def publish_first(self) -> None:
        """The weights that this process begins with, as a new version; opens the first round.

        Not while the log holds experience of newer weights: whoever has leave left would act with old
        ones and be stale at its turn, behind all that. The restored weights then catch up first.
        """
        if self._is_catching_up():
            log.info("catching up before publishing", extra={"through": self._plan.catch_up_through})
            self._owes_first = True
        else:
            self._parts.publisher.publish(self._offer(evaluate=False))

    def run(self) -> Ending:
        """Learn until done, stopped or drained; leaves a committed checkpoint."""
        ending = self._learn()
        log.info("learning ended", extra={"why": ending.value, "env_steps": self._parts.ledger.env_steps})
        self._parts.health.suspend(UPDATE)
        if self._holds_back:
            self._parts.publisher.offer(self._offer(evaluate=False))
        self._parts.publisher.flush()
        if ending in (Ending.STEPS, Ending.RECORDING):
            self._evaluate_last()
        if ending.finished and ending is not Ending.TARGET and self._plan.restore_best:
            self._restore_best()
        self._save()
        self._parts.recorder.write(self.moment, now=True)
        return ending

    def moment(self) -> Moment:
        """Where the run is; may be asked from any thread."""
        parts, renewal = self._parts, self._parts.lease.renewal
        mean_return, episode_length = parts.episodes.means()
        return Moment(
            training_seconds=parts.clock.seconds(),
            env_steps=parts.ledger.env_steps,
            updates=parts.algorithm.updates,
            version=parts.publisher.latest.version,
            episodes=parts.episodes.count,
            mean_return=mean_return,
            episode_length=episode_length,
            publish_s=parts.publisher.seconds,
            checkpoint_s=parts.keeper.seconds,
            log_bytes=renewal.log_bytes,
            outstanding=renewal.outstanding,
            budget=self._plan.budget,
            evaluated=parts.evaluation.figures(),
        )

    # ---- learning

    def _learn(self) -> Ending:
        parts = self._parts
        while True:
            parts.crew.check()
            self._show_books()
            ending = self._ending()
            if ending is not None:
                return ending
            if parts.reopened.is_set():
                self._publish_again()
            if parts.keeper.due(parts.lease.renewal) or self._is_candidate():
                self._save()
            if parts.lease.renewal.desired is RunState.PAUSED:
                self._pause()
                continue
            parts.health.expect(UPDATE, "")
            failpoint("loop.waiting", parts.ledger.position)
            delivery = self._take()
            if delivery is not None:
                self._consume(delivery)
            parts.recorder.write(self.moment)

    def _is_candidate(self) -> bool:
        """Whether the best checkpoint may turn out to be one of this update."""
        return self._plan.keep_best and self._parts.evaluation.lacks_checkpoint(self._parts.algorithm.updates)

    def _take(self) -> Delivery | None:
        """A batch, if there is one soon. The wait is told as it goes on: whoever has no batch at all starves most."""
        began = time.perf_counter()
        delivery = self._parts.feed.take(_TAKE_S)
        metrics.LEARNER_WAIT_SECONDS.inc(time.perf_counter() - began)
        return delivery

    def _ending(self) -> Ending | None:
        parts, plan = self._parts, self._plan
        if parts.draining.is_set():
            return Ending.DRAINED
        if parts.lease.renewal.desired is RunState.STOPPING:
            return Ending.STOPPED
        if plan.stop_at_target and parts.evaluation.solved is not None:
            return Ending.TARGET
        if parts.evaluation.hopeless:
            return Ending.NO_IMPROVEMENT
        if parts.health.has_stalled(UPDATE):
            self.stalled = self._why_stalled()
            return Ending.STALLED
        if plan.total_steps is not None and parts.ledger.env_steps >= plan.total_steps:
            return Ending.STEPS
        return Ending.RECORDING if parts.feed.exhausted else None

    def _why_stalled(self) -> str:
        text = cause(self._parts.status(), self._dropped, self._plan.stall_timeout_s)
        self._parts.health.fail(text)
        return text

    def _pause(self) -> None:
        self._parts.health.suspend(UPDATE)
        failpoint("pause.waiting")
        self._parts.draining.wait(_TAKE_S)
        self._waited_since = time.perf_counter()

    def _consume(self, delivery: Delivery) -> None:
        parts = self._parts
        parts.clock.start(delivery.created_us)
        turn = parts.algorithm.updates
        wait_s = time.perf_counter() - self._waited_since
        update = self._update(delivery)
        compute_s = time.perf_counter() - self._waited_since - wait_s
        self._book(delivery, update)
        self._record(delivery, turn)
        parts.keeper.consumed(delivery.size)
        if delivery.round is not None:
            self._round = delivery.round + 1
        self._publish(update, _trace(delivery, update, turn, compute_s))
        if self._nan_in_a_row >= _MAX_NAN:
            self._give_up()
        if delivery.batch is not None:
            values = update.metrics if update is not None else {}
            parts.recorder.updated(delivery, values, update=turn, wait_s=wait_s, compute_s=compute_s)
            for generations in map(parts.publisher.generations, delivery.versions):
                if generations is not None:
                    metrics.GENERATIONS.observe(generations)
        if update is not None and update.applied:
            parts.health.progress(UPDATE)
            self._dropped.clear()
        self._waited_since = time.perf_counter()

    def _update(self, delivery: Delivery) -> Update | None:
        if delivery.batch is None:
            return None
        failpoint("update.before", delivery.last)
        if self._parts.algorithm.settles is Settles.ON_INSERT:
            # Actors go on while gradient steps are made; a crash sets the settled position back.
            self._parts.publisher.offer(Offer(settled=delivery.last))
        progress = self._progress()
        self._parts.ranks.turn(progress)
        update = self._parts.algorithm.update(delivery.batch, progress=progress)
        self._parts.ranks.agree(self._parts.algorithm, update)
        failpoint("update.after", delivery.last)
        if update.applied:
            self._nan_in_a_row = 0
            metrics.UPDATES.inc()
            metrics.TRAINED_STEPS.inc(update.steps)
            return update
        metrics.UPDATES_SKIPPED.labels(update.reason).inc()
        self._parts.feed.skipped()
        if update.reason == "nan":
            self._alarm(delivery, update)
        return update

    def _alarm(self, delivery: Delivery, update: Update) -> None:
        self._nan_in_a_row += 1
        count = self._parts.algorithm.updates
        self._evidence = keep_evidence(self._plan.evidence_dir, delivery, update, count)
        words = {"evidence": self._evidence, "last": delivery.last}
        log.error("update skipped: a value was not finite", extra=words)

    def _give_up(self) -> NoReturn:
        """Ends the run rather than this process: started again it would do the same.

        What was not finite is booked and behind a checkpoint, so a run that is resumed with other
        settings does not meet it again. It happened within a second: who collects the metrics is waited for.
        """
        self._save()
        self._show_books()
        self._parts.health.await_readers(LAST_READ_S, self._parts.draining)
        raise RunFailed(
            f"{_MAX_NAN} updates in a row were not finite; evidence in {self._evidence}; "
            "lower algorithm.learning_rate or look at the environment's rewards"
        )

    def _book(self, delivery: Delivery, update: Update | None) -> None:
        trained, dropped, steps = delivery.trained, dict(delivery.dropped), delivery.steps
        if update is not None and update.reason == "nan":
            trained, dropped, steps = (), dropped | dict.fromkeys(delivery.trained, Drop.NAN), 0
        self._parts.ledger.book(
            delivery.last, trained=trained, dropped=dropped, steps=steps, origins=delivery.origins
        )
        for reason in dropped.values():
            self._dropped[reason.value] += 1

    def _record(self, delivery: Delivery, turn: int) -> None:
        """What was consumed and how, once it is certain."""
        if self._parts.tee is None:
            return
        dropped = {number: reason.value for number, reason in delivery.dropped.items()}
        self._parts.tee.consumed(
            Consumed(
                position=delivery.last,
                update=turn,
                round=delivery.round,
                dropped=dropped,
                fragments=delivery.fragments,
            )
        )

    def _show_books(self) -> None:
        """All as of one renewal and one position, so that one fragment in none of them shows.

        Also what is 0: of a series that begins with its first event nobody can tell that it rose.
        """
        ledger, renewal = self._parts.ledger, self._parts.lease.renewal
        # What was booked beyond that renewal's head was acknowledged since.
        head = max(renewal.head, ledger.position)
        metrics.LEDGER_ACKED.set(renewal.acked + head - renewal.head)
        metrics.LEDGER_LOST.set(renewal.log_lost)
        metrics.LEDGER_RESIDENT.set(head - ledger.position)
        metrics.LEDGER_TRAINED.set(ledger.trained)
        for reason in Drop:
            metrics.LEDGER_DROPPED.labels(reason.value).set(ledger.dropped[reason.value])

    # ---- publishing

    def _publish(self, update: Update | None, trace: str) -> None:
        parts = self._parts
        if self._is_catching_up():
            parts.publisher.offer(Offer(settled=parts.ledger.position))
            return
        applied = update is not None and update.applied and update.publish
        # Even where all that there was is stale: actors with the weights of before would only send more of it.
        publishes = applied or self._owes_first
        self._owes_first = False
        self._holds_back = not publishes and (self._holds_back or (update is not None and update.applied))
        evaluate = applied and parts.evaluation.wanted(
            parts.episodes.recent(), update=parts.algorithm.updates, env_steps=parts.ledger.env_steps
        )
        if parts.algorithm.lock_step or (evaluate and self._plan.keep_best):
            # Here and now: what is evaluated must be what the checkpoint will hold.
            parts.publisher.publish(self._offer(evaluate=evaluate, trace=trace))
        elif publishes:
            parts.publisher.offer(self._offer(evaluate=evaluate, trace=trace))
        else:
            parts.publisher.offer(Offer(settled=parts.ledger.position))

    def _is_catching_up(self) -> bool:
        return self._parts.ledger.position < self._plan.catch_up_through

    def _publish_again(self) -> None:
        """Redis came back: it may have forgotten the weights, and what is being evaluated."""
        self._parts.reopened.clear()
        self._parts.publisher.publish(self._offer(evaluate=self._parts.evaluation.pending))

    def _offer(self, *, evaluate: bool, trace: str = "") -> Offer:
        parts = self._parts
        (module,) = parts.algorithm.published_modules().values()
        return Offer(
            settled=parts.ledger.position,
            weights=weights.snapshot(module),
            update=parts.algorithm.updates,
            scalars=parts.algorithm.scalars(self._progress()),
            evaluate=evaluate,
            round=self._round if parts.algorithm.lock_step else None,
            env_steps=parts.ledger.env_steps,
            at_s=parts.clock.seconds(),
            traces=(trace,) if trace else (),
        )

    def _progress(self) -> float:
        total = self._plan.total_steps
        return 0.0 if total is None else min(1.0, self._parts.ledger.env_steps / total)

    # ---- evaluating

    def _evaluate_last(self) -> None:
        """Wait for what is under way, then for the last weights where they were not evaluated yet."""
        self._await_evaluation()
        if not self._ending_early() and self._parts.evaluation.ask(self._parts.algorithm.updates):
            self._parts.publisher.publish(self._offer(evaluate=True))
            if self._plan.keep_best:
                self._save()
            self._await_evaluation()

    def _await_evaluation(self) -> None:
        """Until the result is there, at most for `evaluation.timeout_s` from now."""
        parts, timeout_s = self._parts, self._plan.evaluation_timeout_s
        deadline = time.monotonic() + timeout_s
        if parts.evaluation.pending and not self._ending_early():
            log.info("waiting for an evaluation actor to play the weights", extra={"at_most_s": timeout_s})
        while parts.evaluation.pending and not self._ending_early():
            parts.crew.check()
            if parts.reopened.is_set():
                self._publish_again()
            if time.monotonic() > deadline:
                log.error(
                    "no evaluation came back in time: is an evaluation actor running?",
                    extra={"timeout_s": timeout_s},
                )
                abandoned = parts.evaluation.abandon()
                if abandoned is not None:
                    parts.publisher.withdraw(abandoned)
            parts.draining.wait(_TAKE_S)

    def _ending_early(self) -> bool:
        return self._parts.draining.is_set() or self._parts.lease.renewal.desired is RunState.STOPPING

    def _restore_best(self) -> None:
        """The weights of the best evaluation become the newest version: a new number, the same bytes.

        Optimiser and counters stay where they are, so that a run that is resumed goes on from these weights.
        """
        parts, best = self._parts, self._parts.evaluation.best
        if best is None or best.candidate.version == parts.publisher.latest.version:
            return
        (module,) = parts.algorithm.published_modules().values()
        weights.load_into(module, best.candidate.blob)
        offer = self._offer(evaluate=False)
        parts.publisher.publish(replace(offer, update=best.candidate.update, round=None))
        self.restored = best
        words = {"of": best.candidate.version, "mean": best.mean, "as": parts.publisher.latest.version}
        log.info("the best version was restored", extra=words)

    # ---- keeping

    def _save(self) -> None:
        parts = self._parts
        if parts.tee is not None:
            parts.tee.sync()
        parts.keeper.spare(*parts.evaluation.checkpoints())
        state, best = parts.evaluation.state()
        parts.keeper.save(
            parts.algorithm,
            Progress(
                run=self._plan.run,
                sections=self._plan.sections,
                position=parts.ledger.position,
                round=self._round,
                updates=parts.algorithm.updates,
                training_seconds=parts.clock.seconds(),
                totals=parts.ledger.totals(),
                episodes=parts.episodes.state(),
                staleness=parts.recorder.staleness.state(),
                evaluation=state,
                recorded=parts.feed.taken,
                log=parts.lease.known(),
            ),
            {BEST: bytes_tensor(best)},
        )
        if self._plan.keep_best:
            parts.evaluation.kept_as(parts.keeper.last_id, parts.algorithm.updates)


def _trace(delivery: Delivery, update: Update | None, turn: int, took_s: float) -> str:
    """A span of the update, with links to its fragments; "" where none of them is traced."""
    if update is None or not delivery.traces:
        return ""
    return tracing.record(
        "learner.update",
        took_s,
        links=delivery.traces,
        update=turn,
        fragments=len(delivery.trained),
        steps=delivery.steps,
        applied=update.applied,
    )
