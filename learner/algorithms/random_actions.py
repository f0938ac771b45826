"""Acting at random: the baseline beside which what is learned is judged. Nothing is learned.

Choices are uniform; numbers are drawn around 0 with the deviations that a policy begins with. Batches are
counted and forgotten, so that the curve of a run is that of random actions.
"""

import torch
from torch import nn

from penstock.config.settings import RandomSection
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Settles, Update
from penstock.learner.algorithms.shared.containment import EMPTY
from penstock.learner.algorithms.shared.stored import copies, load_copies
from penstock.learner.batch import Batch
from penstock.policy.policy import Policy

METRICS = ()
"""There is nothing to measure."""


class RandomActions(Algorithm):
    """Owns the policy's weights from now on: what comes before its actions is made 0."""

    settles = Settles.ON_INSERT

    def __init__(self, policy: Policy, section: RandomSection, *, seed: int) -> None:
        del seed
        self.policy, self.section = policy, section
        with torch.no_grad():
            for parameter in policy.actor_head.parameters():
                parameter.zero_()

    def budget(self, fragment_charge: int) -> int:
        """Return the steps of two batches or of two fragments, the larger."""
        return 2 * max(self.section.batch_steps, fragment_charge)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        """Return whether the charges reach the batch size."""
        return charge >= self.section.batch_steps

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Count a batch."""
        steps = int(batch.valid.sum())
        self._updates += bool(steps)
        return Update(
            applied=bool(steps),
            reason="" if steps else EMPTY,
            steps=steps,
            gradient_steps=0,
            metrics={},
            publish=False,
            collects=True,
        )

    def published_modules(self) -> dict[str, nn.Module]:
        """The policy, as `default`."""
        return {"default": self.policy}

    def state(self) -> AlgorithmState:
        """Weights and what was counted."""
        return AlgorithmState(tensors=copies("policy", self.policy), numbers={"updates": self._updates})

    def restore(self, state: AlgorithmState) -> None:
        """See `Algorithm`."""
        load_copies(self.policy, "policy", state.tensors)

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        if "updates" not in state.numbers:
            raise ValueError("algorithm state: updates missing")
        load_copies(self.policy, "policy", state.tensors)
        self._updates = int(state.numbers["updates"])
