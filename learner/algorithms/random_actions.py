"""Acting at random: the baseline beside which what is learned is judged. Nothing is learned.

Choices are uniform; numbers are drawn around 0 with the deviations that a policy begins with.
"""

import torch

from penstock.config.settings import RandomSection
from penstock.learner.algorithms.algorithm import AlgorithmState, Settles, Update
from penstock.learner.algorithms.containment import EMPTY
from penstock.learner.algorithms.optimiser import Trained
from penstock.learner.batch import Batch
from penstock.policy.policy import Policy

METRICS = ()
"""There is nothing to measure."""


class RandomActions(Trained):
    """Owns the policy's weights from now on: what comes before its actions is made 0."""

    settles = Settles.ON_INSERT
    needed = ("updates",)

    def __init__(self, policy: Policy, section: RandomSection, *, seed: int) -> None:
        del seed
        self.policy, self.section, self.modules = policy, section, {"policy": policy}
        with torch.no_grad():
            for parameter in policy.actor_head.parameters():
                parameter.zero_()

    def budget(self, fragment_charge: int) -> int:
        return 2 * max(self.section.batch_steps, fragment_charge)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        return charge >= self.section.batch_steps

    def update(self, batch: Batch, *, progress: float) -> Update:
        steps = int(batch.valid.sum())
        self._updates += bool(steps)
        reason = "" if steps else EMPTY
        return Update(applied=bool(steps), reason=reason, steps=steps, publish=False, collects=True)

    def restore(self, state: AlgorithmState) -> None:
        self._load_learned(state)
