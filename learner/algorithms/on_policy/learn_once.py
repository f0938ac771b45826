"""What all algorithms have in common that learn from each batch once and forget it: batches and budget."""

from abc import ABC
from collections.abc import Sequence
from typing import Generic, TypeVar

from learner.algorithms.algorithm import Charged, Retained, Settles
from learner.batch import Batch
from penstock.config.settings import OnPolicySection
from penstock.wire.schema import TensorRule

Own = TypeVar("Own", bound=OnPolicySection)


class LearnsOnce(ABC, Generic[Own]):
    """The part of an `Algorithm` that does not depend on what is learned."""

    def __init__(self, section: Own) -> None:
        self.section = section
        self.lock_step = section.lock_step
        self.settles = Settles.ON_PUBLISH
        self.hard_staleness: int | None = section.stale_after or 4 * (section.staleness + 1)
        self._updates = 0

    @property
    def updates(self) -> int:
        """Applied updates in this model's own lineage."""
        return self._updates

    def requires(self) -> tuple[TensorRule, ...]:
        """Nothing beyond the standard tensors."""
        return ()

    def budget(self, fragment_charge: int) -> int:
        """(S+1)·B; raises ValueError with both numbers when it is below one fragment."""
        budget = (self.section.staleness + 1) * self.section.batch_steps
        if budget < fragment_charge:
            raise ValueError(
                f"algorithm.batch_steps: the budget of {budget} steps is below one fragment of "
                f"{fragment_charge}; raise batch_steps or lower actor.unroll_length or environment.count"
            )
        return budget

    def take(self, pending: Sequence[Charged]) -> int:
        """The fewest fragments whose charges reach B."""
        total = 0
        for count, fragment in enumerate(pending, 1):
            total += fragment.charge
            if total >= self.section.batch_steps:
                return count
        return 0

    def scalars(self, progress: float) -> dict[str, float]:
        """None."""
        return {}

    def retain_from(self) -> int | None:
        """Nothing behind the settled position."""
        return None

    def retains(self, fragment_bytes: int) -> Retained:
        """Nothing."""
        return Retained()

    def recall(self, batch: Batch) -> None:
        """Never asked: it retains nothing."""

    def end_recall(self) -> int:
        """Nothing was needed."""
        return 0
