"""What is computed once per batch, before its epochs: values, π_prox, advantages, the fixed surrogate.

Everything that later minibatches need lies in `Rows`: the valid steps, flat, in an order that the
epochs permute. Called without gradients.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from learner.algorithms.advantage import Advantages, carries, gae, next_values, vtrace
from learner.algorithms.group import Group, Share
from learner.algorithms.loss import Surrogate, coupled, decoupled, standardise
from learner.algorithms.network import Network
from learner.batch import Batch
from penstock.policy.networks import Inputs
from penstock.policy.normaliser import Moments, moments
from penstock.policy.policy import Policy
from penstock.runtime.settings import AlgorithmSection


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

    def cut(self, sizes: Iterable[int]) -> Iterator["Rows"]:
        """Parts of these sizes, in order, as views."""
        for start, end in pairwise(accumulate(sizes, initial=0)):
            action = {path: values[start:end] for path, values in self.action.items()}
            yield Rows(self.inputs.narrow(start, end - start), action, self.columns[:, start:end])


@dataclass(frozen=True, slots=True)
class Prepared:
    """rows: of this rank.   entropy: scalar, their share of the mean of π_prox.   observed: for the normaliser, if any."""

    rows: Rows
    entropy: Tensor
    observed: Moments | None


def prepare(
    policy: Policy,
    network: Network,
    section: AlgorithmSection,
    batch: Batch,
    rewards: Tensor,
    group: Group,
    share: Share,
) -> Prepared:
    """Prepare a rank's share of a batch with at least one valid step.

    rewards: [T, B], scaled where that is asked for. share: of `batch.valid`, by `group`.
    """
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
    estimated = estimate(policy, section, batch, rewards.to(values.dtype), values, log_ratios)
    fixed = [estimated.advantage, estimated.target, values[:-1]]
    flat = torch.stack([behaviour, proximal, *(tensor.flatten() for tensor in fixed)])
    entropy = policy.joint_entropy(parameters)
    inputs = inputs.narrow(0, count)
    if not bool(batch.valid.all()):
        index = batch.valid.flatten().nonzero().squeeze(1)
        inputs, flat, entropy = inputs.select(index), flat[:, index], entropy[index]
        action = {path: rows[index] for path, rows in action.items()}
    return Prepared(
        # Advantages are standardised over the rows of all ranks.
        rows=Rows(inputs, action, share.own(_columns(section, *share.gather(flat).unbind(0)))),
        entropy=entropy.sum().div_(share.total),
        observed=_observed(policy, batch, group),
    )


def estimate(
    policy: Policy,
    section: AlgorithmSection,
    batch: Batch,
    rewards: Tensor,
    values: Tensor,
    log_ratios: Tensor,
) -> Advantages:
    """Advantages and targets [T, B]. values: [T+1, B]; log_ratios: log π_prox/μ, [T, B]."""
    finals = policy.value(batch.final_observation) if len(batch.final_slot) else values.new_empty(0)
    following = next_values(values, batch.terminated, batch.final_slot, batch.final_step, finals)
    carried = carries(batch.terminated, batch.truncated, batch.valid)
    tensors = (rewards, values[:-1], following, carried, batch.valid)
    if section.advantage == "gae":
        return gae(*tensors, discount=section.discount, trace=section.gae_lambda)
    return vtrace(
        *tensors,
        log_ratios,
        discount=section.discount,
        trace=section.gae_lambda,
        rho_clip=section.rho_clip,
        c_clip=section.c_clip,
    )


def _columns(
    section: AlgorithmSection,
    behaviour: Tensor,
    proximal: Tensor,
    advantage: Tensor,
    target: Tensor,
    value: Tensor,
) -> Tensor:
    chosen = standardise(advantage) if section.normalise_advantages else advantage
    surrogate: Surrogate
    if section.objective == "coupled":
        surrogate = coupled(behaviour, chosen)
    else:
        surrogate = decoupled(behaviour, proximal, chosen, section.behaviour_weight_cap)
    return torch.stack([surrogate.anchor, surrogate.weighted_advantage, target, value, behaviour, proximal])


def _observed(policy: Policy, batch: Batch, group: Group) -> Moments | None:
    if policy.normaliser is None:
        return None
    reals = policy.reader.raw_reals(batch.observation, torch.float64)
    return group.moments(moments(reals[: batch.valid.numel()][batch.valid.flatten()]))
