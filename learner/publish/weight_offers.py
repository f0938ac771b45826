"""Offers to the publisher after each update.

New weights, weights to be evaluated, or only a settled position.

In lock-step, and where a checkpoint must hold exactly what is evaluated, weights are published in the loop's
own thread; else the publisher's thread encodes and sends them while the loop goes on.
"""

import logging
import threading
from dataclasses import dataclass, field, replace

from penstock.config.settings import LearnerSection
from penstock.learner.algorithms.algorithm import Algorithm, Update
from penstock.learner.evaluation.evaluation import Candidate, Evaluation
from penstock.learner.evaluation.reported_episodes import Episodes
from penstock.learner.feed.source import FeedPosition
from penstock.learner.ledger import Ledger
from penstock.learner.publish.publisher import PendingPublication, Publisher
from penstock.learner.reporting.training_clock import TrainingClock
from penstock.policy import weights

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class WeightOffers:
    """Makes the offers; used by the loop's thread. reopened: set when Redis came back.

    catch_up_through: newest entry that the log held when a learner resumed; 0: nothing to catch up with.
    """

    section: LearnerSection
    algorithm: Algorithm
    publisher: Publisher
    evaluation: Evaluation
    episodes: Episodes
    ledger: Ledger
    position: FeedPosition
    clock: TrainingClock
    reopened: threading.Event
    catch_up_through: int
    _holds_back: bool = field(init=False, default=False)
    _owes_first: bool = field(init=False, default=False)
    _offered_steps: int = field(init=False, default=0)

    def publish_first(self) -> None:
        """Publish the weights that this process begins with, as a new version, which opens the first round.

        Not while the log holds experience of newer weights: an actor that still has credit would act with old
        weights and be stale at its turn, behind all that. The restored weights then catch up first.
        """
        if self._is_catching_up():
            log.info("catching up before publishing", extra={"through": self.catch_up_through})
            self._owes_first = True
        else:
            self._publish()

    def after(self, update: Update | None) -> None:
        """Make the offer that an update calls for.

        update: None where all of the batch was dropped.
        """
        if self._is_catching_up():
            self.settle(self.ledger.position)
            return
        applied = update is not None and update.applied and update.publish
        # Even where all that there was is stale: actors with the weights of before would only send more of
        # it.
        evaluate = applied and self.evaluation.wanted(
            self.episodes.recent(),
            update=self.algorithm.updates,
            env_steps=self.ledger.env_steps,
            ended=self.episodes.count,
            length=self.episodes.means()[1],
        )
        publishes = self._owes_first or (applied and (evaluate or self._is_due()))
        self._owes_first = False
        self._holds_back = not publishes and (self._holds_back or (update is not None and update.applied))
        if self.algorithm.lock_step or (evaluate and self.section.keep_best):
            # Here and now: what is evaluated must be what the checkpoint will hold.
            self._publish(evaluate=evaluate)
        elif publishes:
            self.publisher.offer(self._offer(evaluate=evaluate))
        else:
            self.settle(self.ledger.position)

    def settle(self, position: int) -> None:
        """Let actors generate as much as was consumed up to this log entry, without new weights."""
        self.publisher.offer(PendingPublication(settled=position))

    def publish_again(self) -> None:
        """Publish once more where Redis came back.

        It may have forgotten the weights, and what is being evaluated.
        """
        if self.reopened.is_set():
            self.reopened.clear()
            self._publish(evaluate=self.evaluation.pending)

    def publish_restored(self) -> int:
        """Publish the weights that were restored, in this thread, and return their version."""
        self._holds_back = self._owes_first = False
        self._publish()
        return self.publisher.latest.version

    def publish_for_evaluation(self) -> None:
        """Publish the newest weights and have them evaluated, in this thread."""
        self._publish(evaluate=True)

    def publish_best(self, best: Candidate) -> None:
        """Publish the weights of an earlier version again: a new number, the same bytes.

        The policy takes them over.
        """
        (module,) = self.algorithm.published_modules().values()
        weights.load_into(module, best.blob)
        self.publisher.publish(replace(self._offer(evaluate=False), update=best.update, round=None))

    def finish(self) -> None:
        """Publish what was held back, and wait until nothing is under way."""
        if self._holds_back:
            self.publisher.offer(self._offer(evaluate=False))
        self.publisher.flush()

    def _is_due(self) -> bool:
        return self.ledger.env_steps - self._offered_steps >= self.section.publish_interval_steps

    def _is_catching_up(self) -> bool:
        return self.ledger.position < self.catch_up_through

    def _publish(self, *, evaluate: bool = False) -> None:
        self.publisher.publish(self._offer(evaluate=evaluate))

    def _offer(self, *, evaluate: bool) -> PendingPublication:
        (module,) = self.algorithm.published_modules().values()
        self._offered_steps = self.ledger.env_steps
        return PendingPublication(
            settled=self.ledger.position,
            weights=weights.snapshot(module),
            update=self.algorithm.updates,
            scalars=self.algorithm.scalars(self.ledger.fraction_of(self.section.total_steps)),
            evaluate=evaluate,
            round=self.position.round if self.algorithm.lock_step else None,
            env_steps=self.ledger.env_steps,
            at_s=self.clock.seconds(),
        )
