"""Going back to the model of a named checkpoint while the run goes on.

    read → publish what is under way → fits: take over → all ranks agree → drop what is older → publish

Nothing that counts goes back: the restored weights are a new version, and actors with an older one are told
of it as of any other. The caller makes the checkpoint that contains it.
"""

import logging
from dataclasses import dataclass

from penstock.broker.log.learner_log import LearnerLog
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState
from penstock.learner.checkpoint.named_checkpoints import NamedCheckpoints
from penstock.learner.checkpoint.store import Checkpoint
from penstock.learner.feed.source import Feed, FeedPosition
from penstock.learner.progress import check_network
from penstock.learner.publish.weight_offers import WeightOffers
from penstock.learner.ranks.leading import Ranks
from penstock.runtime.failpoint import failpoint

log = logging.getLogger(__name__)


class Mismatch(Exception):
    """Reports a checkpoint of another network or space; the message names what differs."""


class Unsupported(Exception):
    """Reports a command that has no meaning for what this run learns by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """Used by the loop's thread. run, sections: of this run, see `penstock.learner.progress`."""

    run: str
    sections: dict[str, str]
    named: NamedCheckpoints
    algorithm: Algorithm
    ranks: Ranks
    feed: Feed
    position: FeedPosition
    offers: WeightOffers
    learner_log: LearnerLog

    def restore(self, name: str) -> int:
        """Go back to the checkpoint of that name; returns the version under which it was published.

        Raises:
            NameRefused: no checkpoint has the name.
            Damaged: it is not whole.
            Mismatch: it is of another network or space.
            Unsupported: the algorithm cannot go back.
        """
        checkpoint = self.named.read(name)
        failpoint("restore.read")
        self.offers.publisher.flush()
        self._take_over(checkpoint)
        failpoint("restore.applied")
        if not self.algorithm.keeps_restored:
            # Versions rise, and no other thread publishes: whatever was published before is below this.
            self.position.restored_from = self.learner_log.snapshot().version + 1
            self.feed.drop_before(self.position.restored_from)
        version = self.offers.publish_restored()
        failpoint("restore.published")
        log.info("restored a named checkpoint", extra={"checkpoint": name, "version": version})
        return version

    def _take_over(self, checkpoint: Checkpoint) -> None:
        state = AlgorithmState(tensors=checkpoint.tensors, numbers=checkpoint.state["numbers"])
        try:
            check_network(self.run, checkpoint.state["sections"], self.sections)
            self.algorithm.restore(state)
        except ValueError as error:
            raise Mismatch(f"checkpoint {checkpoint.id}: {error}") from error
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
        self.ranks.restore(self.algorithm, state)
