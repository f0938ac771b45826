"""What follows the last update.

The last weights are evaluated, or the best ones become the newest version again.
"""

import logging
import time
from dataclasses import dataclass

from penstock.config.settings import EvaluationSection
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.evaluation.evaluation import Evaluation, Result
from penstock.learner.process.ending import Ending
from penstock.learner.process.interruptions import Interruptions
from penstock.learner.process.run_checkpoints import RunCheckpoints
from penstock.learner.publish.publisher import Publisher
from penstock.learner.publish.weight_offers import WeightOffers

log = logging.getLogger(__name__)


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
