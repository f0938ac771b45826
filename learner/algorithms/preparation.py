"""What is computed once per batch, before its epochs: values, π_prox, advantages, the fixed surrogate.

Everything that later minibatches need lies in `Rows`: the valid steps, flat, in an order that the
epochs permute. Called without gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from learner.algorithms.advantage import Advantages, Unrolls, carries, next_values
from learner.algorithms.loss import Surrogate
from learner.algorithms.network import Network
from learner.batch import Batch
from penstock.policy.networks import Inputs
from penstock.policy.normaliser import Moments, moments
from penstock.policy.policy import Policy

Estimate = Callable[[Unrolls, Tensor], Advantages]
"""Advantages and targets of unrolls, given log π/μ of each step, [T, B]."""
Weigh = Callable[[Tensor, Tensor, Tensor], Surrogate]
"""What stays fixed over a batch, given log μ, log π_prox and advantages, [n] each."""


@dataclass(frozen=True, slots=True)
class Rows:
    """n valid steps. inputs: [n, ...]; action: by path, [n, *shape]; columns: [6, n], named below."""

    inputs: Inputs
    action: dict[str, Tensor]
    columns: Tensor

    def __len__(self) -> int:
        """Number of steps (n)."""
        return self.columns.shape[1]

    @property
    def anchor(self) -> Tensor:
        """Log-probability that the ratio is taken to."""
        return self.columns[0]

    @property
    def weighted_advantage(self) -> Tensor:
        """Advantage times behaviour weight."""
        return self.columns[1]

    @property
    def target(self) -> Tensor:
        """What the critic is drawn to."""
        return self.columns[2]

    @property
    def old_value(self) -> Tensor:
        """V at the start of the batch."""
        return self.columns[3]

    @property
    def behaviour(self) -> Tensor:
        """Log μ."""
        return self.columns[4]

    @property
    def proximal(self) -> Tensor:
        """Log π_prox."""
        return self.columns[5]

    def select(self, index: Tensor) -> "Rows":
        """The rows at an int64 index [m], copied."""
        action = {path: values.index_select(0, index) for path, values in self.action.items()}
        return Rows(self.inputs.select(index), action, self.columns.index_select(1, index))

    def cut(self, pieces: int) -> Iterator["Rows"]:
        """As many nearly equal parts, in order, as views; fewer when there are fewer rows."""
        pieces = min(pieces, len(self))
        edges = [len(self) * i // pieces for i in range(pieces + 1)]
        for start, end in pairwise(edges):
            action = {path: values[start:end] for path, values in self.action.items()}
            yield Rows(self.inputs.narrow(start, end - start), action, self.columns[:, start:end])


@dataclass(frozen=True, slots=True)
class Prepared:
    """rows: those of the batch that are trained.   entropy: scalar, mean of their π_prox.

    index: int64 [n], where they lie among all T·B steps; None: everywhere.   observed: for the normaliser, if any.
    """

    rows: Rows
    index: Tensor | None
    entropy: Tensor
    observed: Moments | None


def prepare(
    policy: Policy,
    network: Network,
    batch: Batch,
    rewards: Tensor,
    trained: Tensor,
    estimate: Estimate,
    weigh: Weigh,
) -> Prepared:
    """Prepare a batch. rewards: [T, B], scaled where that is asked for. trained: bool [T, B], at least one."""
    steps, columns = batch.valid.shape
    count = steps * columns
    inputs = policy.read(batch.observation)
    outputs = network.outputs(inputs)
    action = {path: values.flatten(0, 1) for path, values in batch.action.items()}
    parameters = outputs.parameters[:count]
    proximal = policy.joint_log_prob(parameters, action)
    behaviour = batch.log_prob.flatten().to(proximal.dtype)
    values = outputs.value.view(steps + 1, columns)
    log_ratios = (proximal - behaviour).view(steps, columns)
    estimated = estimate(_unrolls(policy, batch, rewards.to(values.dtype), values), log_ratios)
    fixed = [estimated.advantage, estimated.target, values[:-1]]
    flat = torch.stack([behaviour, proximal, *(tensor.flatten() for tensor in fixed)])
    entropy = policy.joint_entropy(parameters)
    inputs, index = inputs.narrow(0, count), None
    if not bool(trained.all()):
        index = trained.flatten().nonzero().squeeze(1)
        inputs, flat, entropy = inputs.select(index), flat[:, index], entropy[index]
        action = {path: rows[index] for path, rows in action.items()}
    return Prepared(
        rows=Rows(inputs, action, _columns(weigh, *flat.unbind(0))),
        index=index,
        entropy=entropy.mean(),
        observed=_observed(policy, batch),
    )


def _unrolls(policy: Policy, batch: Batch, rewards: Tensor, values: Tensor) -> Unrolls:
    """values: [T+1, B]."""
    finals = policy.value(batch.final_observation) if len(batch.final_slot) else values.new_empty(0)
    following = next_values(values, batch.terminated, batch.final_slot, batch.final_step, finals)
    carried = carries(batch.terminated, batch.truncated, batch.valid)
    return Unrolls(rewards, values[:-1], following, carried, batch.valid)


def _columns(
    weigh: Weigh, behaviour: Tensor, proximal: Tensor, advantage: Tensor, target: Tensor, value: Tensor
) -> Tensor:
    surrogate = weigh(behaviour, proximal, advantage)
    return torch.stack([surrogate.anchor, surrogate.weighted_advantage, target, value, behaviour, proximal])


def _observed(policy: Policy, batch: Batch) -> Moments | None:
    if policy.normaliser is None:
        return None
    reals = policy.reader.raw_reals(batch.observation, torch.float64)
    return moments(reals[: batch.valid.numel()][batch.valid.flatten()])
