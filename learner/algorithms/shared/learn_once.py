"""The base of algorithms that learn from each batch once and forget it: batch size, budget, staleness.

Staleness is bounded twice. The `budget` of outstanding steps is (S+1) batches, S being
`algorithm.staleness`: the broker gives credit within it (`has_room` in `broker/log/scripts/_turns.lua`), so
that what an actor begins now is trained at most S updates later. What is older than `stale_after` updates
all the same is dropped by the feed (`learner/feed/log_feed.py`).
"""

import math
from typing import Generic, TypeVar

from penstock.config.settings import OnPolicySection
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.batch import Batch

Own = TypeVar("Own", bound=OnPolicySection)


class LearnsOnce(Algorithm, Generic[Own]):
    """Takes from the settings what does not depend on what is learned."""

    def __init__(self, section: Own) -> None:
        self.section = section
        self.staleness = section.staleness
        self.lock_step = section.lock_step
        self.flush_below = None if section.lock_step else section.batch_steps
        self.stale_after = section.stale_after or 4 * (section.staleness + 1)

    def minibatches(self, batch: Batch, steps: int) -> int:
        """Return how many minibatches a batch is cut into.

        A flush is smaller than a batch, so it has fewer, each with the steps of any other. steps: of it.
        """
        count: int = getattr(self.section, "minibatches", 1)
        if not batch.is_flushed:
            return count
        return min(count, max(1, math.ceil(steps * count / self.section.batch_steps)))

    def budget(self, fragment_charge: int) -> int:
        """Return the most steps that may be outstanding: (S+1) batches.

        fragment_charge: steps of one fragment, T·N. Raises ValueError, with both numbers, when the budget is
        below it.
        """
        budget = (self.section.staleness + 1) * self.section.batch_steps
        if budget < fragment_charge:
            raise ValueError(
                f"algorithm.batch_steps: the budget of {budget} steps is below one fragment of "
                f"{fragment_charge}; raise batch_steps or lower actor.unroll_length or environment.count"
            )
        return budget

    def makes_batch(self, fragments: int, charge: int) -> bool:
        """Return whether fragments make a batch of B steps. charge: the sum of theirs, in steps."""
        return charge >= self.section.batch_steps
