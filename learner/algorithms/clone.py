"""Behaviour cloning: the actions of a recording are made likely (Pomerleau 1991; Bain and Sammut 1995).

    L = −E[ log π(a|s) ] + c_v · ½ E[ (V(s) − R)² ]

The first term is the cross-entropy of a choice and the negative log-likelihood of a Gaussian. The second, off
by default, fits the critic to the discounted returns R for later training with values. R is bootstrapped with
the critic's value where a fragment is cut.

    read → returns → [minibatch steps] → finite? → merge statistics, measure the held-out steps
                                            └ no: everything back

As in PPO, a recurrent policy is trained on whole columns of a batch, unrolled from their recorded state, and
stacks of frames are read.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.config.settings import CloneSection
from penstock.learner.algorithms.algorithm import EMPTY, Trained, Update, contained, verdict
from penstock.learner.algorithms.gradient import FlatAdam, network_of
from penstock.learner.algorithms.losses import gae, value_loss
from penstock.learner.algorithms.rows import (
    RankGroup,
    Rows,
    Sequences,
    Statistics,
    observed_by,
    see,
    sequences_of,
    unrolls_of,
    values_of,
)
from penstock.learner.batch import Batch
from penstock.policy.actor_critic import SeenTrajectory
from penstock.policy.networks import measure, thinned
from penstock.policy.policy import Policy

METRICS = (
    "nll", "accuracy", "value_loss", "gradient_norm", "learning_rate",
    "validation_nll", "validation_accuracy",
)  # fmt: skip
"""`nll` is the mean of −log π(a|s) in nats before each gradient step. `accuracy` is the share of steps in
which every choice was the most likely one, after the update; actions that are not choices have none.
`validation_…` are those of the steps held out, after the update."""


class Clone(Trained):
    """An `Imitator`, too. It owns the policy's weights: do not convert or move the policy afterwards."""

    policy: Policy
    staleness = 1
    """The smallest that is not lock-step: no actor takes part."""

    def __init__(self, policy: Policy, section: CloneSection, *, seed: int) -> None:
        self.policy = policy
        self.section = section
        self.passes = section.passes
        self.validation = section.validation
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser)
        self._seed = seed
        self._permutations = torch.Generator().manual_seed(seed)
        self.modules, self.optimisers = {"policy": policy}, {"": self._optimiser}
        self.generators = {"permutations": self._permutations}
        self._held_out: Batch | None = None

    def budget(self, fragment_charge: int) -> int:
        return max(self.section.batch_steps, fragment_charge)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        return charge >= self.section.batch_steps

    def validate_on(self, batch: Batch) -> None:
        self._held_out = batch

    def update(self, batch: Batch, *, progress: float) -> Update:
        return contained(self._attempt, batch)

    def _attempt(self, batch: Batch, *, is_rehearsal: bool) -> Update:
        with torch.no_grad():
            look = see(self.policy, batch)
            steps = self._steps(batch, look)
        if not steps.steps:
            return Update(applied=False, reason=EMPTY)
        with self.undoing() as trial:
            made = self._train(steps)
            activations = measure(self.policy, lambda: self.policy.bodies(steps.alone()))
            statistics = Statistics(observed_by(self.policy, look, batch, RankGroup()), activations)
            # The one read of the device: means over gradient steps, and all that must be finite.
            checks = torch.stack([self._optimiser.checksum().double(), *statistics.checks()])
            judged: list[float] = torch.cat([torch.stack(made).mean(0).double(), checks]).tolist()
            reason = verdict(judged)
            trial.is_kept = not reason and not is_rehearsal
            if trial.is_kept:
                statistics.merge(self.policy)
                self._updates += 1
        metrics: dict[str, float] = {}
        if trial.is_kept:
            metrics = dict(zip(("nll", "value_loss", "gradient_norm"), judged, strict=False))
            metrics |= {"learning_rate": self.section.learning_rate, **self._measure(batch)}
        return Update(
            applied=not reason,
            reason=reason,
            steps=steps.steps,
            gradient_steps=len(made),
            metrics=metrics,
        )

    def _steps(self, batch: Batch, look: SeenTrajectory) -> Rows | Sequences:
        """Return the valid steps with returns as targets, in whole columns where a policy remembers."""
        shape = batch.valid.shape
        targets = look.inputs.vector.new_zeros((6, shape[0] * shape[1]))
        if self.section.value_coefficient:
            targets[2] = self._returns(batch, look).flatten()
        action = {path: rows.flatten(0, 1) for path, rows in batch.action.items()}
        if look.starts is not None:
            sequences, _ = sequences_of(
                self.policy, batch.valid, look, action, lambda index: targets[:, index]
            )
            return sequences.select(torch.from_numpy(sequences.counts.nonzero()[0]))
        index = batch.valid.flatten().nonzero().squeeze(1)
        chosen = {path: rows.index_select(0, index) for path, rows in action.items()}
        return Rows(targets[:, index], look.inputs.select(index), chosen)

    def _returns(self, batch: Batch, look: SeenTrajectory) -> Tensor:
        """Return discounted returns, [T, B]: GAE's target with λ = 1."""
        value = self._network.outputs(look.inputs).value.clone()
        values, finals = values_of(self.policy, look, value, (len(batch.valid), batch.valid.shape[1]))
        unrolls = unrolls_of(batch, batch.reward.to(values.dtype), values, finals)
        return gae(*unrolls, discount=self.section.discount, gae_lambda=1.0).target

    def _train(self, steps: Rows | Sequences) -> list[Tensor]:
        """Make one pass; returns −log π, value loss and gradient norm of each gradient step, [3]."""
        order = torch.randperm(len(steps), generator=self._permutations)
        parts = order.tensor_split(min(self.section.minibatches, len(steps)))
        sizes = [(len(part), len(part)) for part in parts]
        return [self._gradient_step(rows) for rows in steps.select(order).cut(sizes)]

    def _gradient_step(self, steps: Rows) -> Tensor:
        """Train one minibatch; returns −log π, value loss and gradient norm, [3], before the step."""
        # Without a ratio, dropout is that of supervised learning.
        seed, device = self._seed + self._optimiser.steps, steps.inputs.vector.device
        with thinned(self.policy.dropouts, seed, device):
            outputs = self._network.outputs(steps.inputs)
        loss = nll = -self.policy.joint_log_prob(outputs.parameters, steps.action).mean()
        error = nll.new_zeros(())
        if self.section.value_coefficient:
            error = value_loss(outputs.value, steps.target, steps.target, None)
            loss = nll + self.section.value_coefficient * error
        gradient = self._network.gradient(loss)
        norm = self._optimiser.step(gradient, self.section.learning_rate, self.section.max_gradient_norm)
        return torch.stack([nll.detach(), error.detach(), norm])

    @torch.no_grad()
    def _measure(self, batch: Batch) -> dict[str, float]:
        found = {name: value for name, value in self._score(batch).items() if name == "accuracy"}
        if self._held_out is not None and bool(self._held_out.valid.any()):
            scores = self._score(self._held_out)
            found |= {f"validation_{name}": value for name, value in scores.items()}
        return found

    def _score(self, batch: Batch) -> dict[str, float]:
        whole = self._steps(batch, see(self.policy, batch))
        (steps,) = whole.cut([(len(whole), len(whole))])
        parameters = self._network.outputs(steps.inputs).parameters
        scores = {"nll": -float(self.policy.joint_log_prob(parameters, steps.action).mean())}
        if all(np.issubdtype(head.action_dtype, np.integer) for head in self.policy.action_heads):
            scores["accuracy"] = self._accuracy(parameters, steps.action)
        return scores

    def _accuracy(self, parameters: Tensor, action: dict[str, Tensor]) -> float:
        likely = self.policy.choose(
            parameters.cpu().numpy(), np.random.default_rng(0), deterministic=True
        ).action
        right = [
            (likely[path] == rows.cpu().numpy()).reshape(len(rows), -1).all(1)
            for path, rows in action.items()
        ]
        return float(np.logical_and.reduce(right).mean())
