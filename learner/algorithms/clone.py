"""Behaviour cloning: the actions of a recording are made likely (Pomerleau 1991; Bain and Sammut 1995).

    L = −E[ log π(a|s) ] + c_v · ½ E[ (V(s) − R)² ]

The first term is the cross-entropy of a choice and the negative log-likelihood of a Gaussian; the second, off
unless asked for, fits the critic to the discounted returns R, so that what is trained further begins with
values. Where a fragment is cut R goes on with the critic's own value.

    read → returns → [minibatch steps] → finite? → merge statistics, measure the held-out steps
                                            └ no: everything back
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from learner.algorithms.algorithm import Algorithm, AlgorithmState, Update
from learner.algorithms.fast.network import network_of
from learner.algorithms.fast.optimiser import FlatAdam
from learner.algorithms.shared.advantage import carries, gae, next_values
from learner.algorithms.shared.loss import value_loss
from learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from learner.batch import Batch
from penstock.config.settings import CloneSection
from penstock.policy.layers import measure, thinned
from penstock.policy.networks import Inputs
from penstock.policy.normaliser import moments
from penstock.policy.policy import Policy

METRICS = (
    "nll", "accuracy", "value_loss", "gradient_norm", "learning_rate",
    "validation_nll", "validation_accuracy",
)  # fmt: skip
"""`nll` is the mean of −log π(a|s) in nats before each gradient step. `accuracy` is the share of steps in
which every choice was the most likely one, after the update; actions that are not choices have none.
`validation_…` are those of the steps held out, after the update."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The valid steps of a batch, n of them.

    inputs: [n, ...]; action: by path, [n, *shape]; returns: [n], or None where no critic is fitted.
    """

    inputs: Inputs
    action: dict[str, Tensor]
    returns: Tensor | None

    def select(self, index: Tensor) -> "_Steps":
        """The rows at an int64 index."""
        action = {path: rows.index_select(0, index) for path, rows in self.action.items()}
        returns = None if self.returns is None else self.returns.index_select(0, index)
        return _Steps(self.inputs.select(index), action, returns)


class Clone(Algorithm):
    """An `Imitator` as well. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(self, policy: Policy, section: CloneSection, *, seed: int) -> None:
        self.policy = policy
        self.section = section
        self.passes = section.passes
        self.validation = section.validation
        self._optimiser = FlatAdam(policy, section.adam_epsilon)
        self._network = network_of(policy, self._optimiser)
        self._seed = seed
        self._permutations = torch.Generator().manual_seed(seed)
        self._held_out: Batch | None = None

    def budget(self, fragment_charge: int) -> int:
        """Nobody acts: as much as any fragment is."""
        return max(self.section.batch_steps, fragment_charge)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        """Whether the charges reach the batch size, B steps."""
        return charge >= self.section.batch_steps

    def validate_on(self, batch: Batch) -> None:
        """Measure on these from now on."""
        self._held_out = batch

    def published_modules(self) -> dict[str, nn.Module]:
        """The policy, as `default`."""
        return {"default": self.policy}

    def update(self, batch: Batch, *, progress: float) -> Update:
        """One pass over a batch."""
        if not bool(batch.valid.any()):
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        with torch.no_grad():
            steps = self._steps(batch)
        backup = self._optimiser.backup()
        count = len(next(iter(steps.action.values())))
        order = torch.randperm(count, generator=self._permutations).to(batch.valid.device)
        parts = order.tensor_split(min(self.section.minibatches, count))
        trace = torch.stack([self._gradient_step(steps.select(part)) for part in parts])
        activations = measure(self.policy, lambda: self.policy.bodies(steps.inputs))
        checksums = self._optimiser.checksum() + (0.0 if activations is None else activations.checksum())
        # The one read of the device.
        *means, checksum = [*trace.mean(0).tolist(), float(checksums)]
        if not all(map(math.isfinite, (*means, checksum))):
            self._optimiser.restore(backup)
            return Update(applied=False, reason="nan", steps=count, gradient_steps=len(parts), metrics={})
        if activations is not None:
            activations.merge()
        self._observe(batch)
        self._updates += 1
        metrics = dict(zip(("nll", "value_loss", "gradient_norm"), means, strict=True))
        metrics |= {"learning_rate": self.section.learning_rate, **self._measure(batch)}
        return Update(applied=True, reason="", steps=count, gradient_steps=len(parts), metrics=metrics)

    def _steps(self, batch: Batch) -> _Steps:
        """The valid steps, flat."""
        index = batch.valid.flatten().nonzero().squeeze(1)
        inputs = self.policy.read(batch.observation)
        action = {path: rows.flatten(0, 1).index_select(0, index) for path, rows in batch.action.items()}
        returns = self._returns(batch, inputs).flatten()[index] if self.section.value_coefficient else None
        return _Steps(inputs.select(index), action, returns)

    def _returns(self, batch: Batch, inputs: Inputs) -> Tensor:
        """Discounted, [T, B]: GAE's target with λ = 1."""
        steps, columns = batch.valid.shape
        values = self._network.outputs(inputs).value.view(steps + 1, columns).clone()
        finals = self.policy.value(batch.final_observation) if len(batch.final_slot) else values.new_empty(0)
        following = next_values(values, batch.terminated, batch.final_slot, batch.final_step, finals)
        carried = carries(batch.terminated, batch.truncated, batch.valid)
        rewards = batch.reward.to(values.dtype)
        estimated = gae(
            rewards, values[:-1], following, carried, batch.valid, discount=self.section.discount, trace=1.0
        )
        return estimated.target

    def _gradient_step(self, steps: _Steps) -> Tensor:
        """One minibatch; −log π, value loss and the gradient's norm, [3], from before the step."""
        # There is no ratio here: dropout is that of any supervised learning.
        seed, device = self._seed + self._optimiser.steps, steps.inputs.vector.device
        with thinned(self.policy.dropouts, seed, device):
            outputs = self._network.outputs(steps.inputs)
        log_prob = self.policy.joint_log_prob(outputs.parameters, steps.action)
        built, slopes = [log_prob], [torch.full_like(log_prob, -1.0 / len(log_prob))]
        error = log_prob.new_zeros(())
        if steps.returns is not None:
            value = value_loss(outputs.value.detach(), steps.returns, steps.returns, None)
            built.append(outputs.value)
            slopes.append(value.slope.mul_(self.section.value_coefficient))
            error = value.loss
        gradient = self._network.gradient(built, slopes)
        norm = self._optimiser.step(gradient, self.section.learning_rate, self.section.max_gradient_norm)
        return torch.stack([-log_prob.detach().mean(), error, norm])

    def _observe(self, batch: Batch) -> None:
        if self.policy.normaliser is not None:
            reals = self.policy.reader.raw_reals(batch.observation, torch.float64)
            self.policy.normaliser.merge(moments(reals[: batch.valid.numel()][batch.valid.flatten()]))

    @torch.no_grad()
    def _measure(self, batch: Batch) -> dict[str, float]:
        """Accuracy on the batch, and how well the steps held out are predicted."""
        found = {name: value for name, value in self._score(batch).items() if name == "accuracy"}
        if self._held_out is not None and bool(self._held_out.valid.any()):
            scores = self._score(self._held_out)
            found |= {f"validation_{name}": value for name, value in scores.items()}
        return found

    def _score(self, batch: Batch) -> dict[str, float]:
        steps = self._steps(batch)
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

    def state(self) -> AlgorithmState:
        """Weights, moments and generator; copies."""
        tensors = copies("policy", self.policy)
        tensors |= {f"optimiser/{name}": moment for name, moment in self._optimiser.moments().items()}
        tensors["generator/permutations"] = self._permutations.get_state()
        numbers = {"updates": self._updates, "gradient_steps": self._optimiser.steps}
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def restore(self, state: AlgorithmState) -> None:
        """See `Algorithm`."""
        self.load(taken_over(self.state(), state, going_on=("generator/",)))

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        if not {"updates", "gradient_steps"} <= state.numbers.keys():
            raise ValueError("algorithm state: updates or gradient_steps missing")
        load_copies(self.policy, "policy", state.tensors)
        self._optimiser.load_moments(under(state.tensors, "optimiser/"), int(state.numbers["gradient_steps"]))
        self._permutations.set_state(state.tensors["generator/permutations"])
        self._updates = int(state.numbers["updates"])
