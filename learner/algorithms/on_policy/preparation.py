"""What is computed once per batch, before its epochs: values, π_prox, advantages, the fixed surrogate.

Everything that later minibatches need lies in `Rows`: the valid steps, flat, in an order that the
epochs permute; for a recurrent policy in `Sequences`, whose columns they permute whole. Called without
gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.learner.algorithms.fast.network import Network
from penstock.learner.algorithms.shared.advantage import Advantages, Unrolls
from penstock.learner.algorithms.shared.loss import Surrogate
from penstock.learner.algorithms.shared.rank_group import RankGroup, RankRows
from penstock.learner.algorithms.shared.rows import Rows
from penstock.learner.algorithms.shared.seen_batch import (
    observed_by,
    see,
    sequences_of,
    unrolls_of,
    values_of,
)
from penstock.learner.algorithms.shared.sequences import Sequences
from penstock.learner.batch import Batch
from penstock.policy.memory import SeenTrajectory
from penstock.policy.normaliser import Moments
from penstock.policy.numbers import Numbers
from penstock.policy.policy import Policy

Estimate = Callable[[Unrolls, Tensor], Advantages]
"""Advantages and targets of unrolls, given log π/μ of each step, [T, B]."""
Weigh = Callable[[Tensor, Tensor, Tensor], Surrogate]
"""What stays fixed over a batch, given log μ, log π_prox and advantages, [n] each."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an update prepares before its epochs.

    rows: those of this rank that are trained.   steps: of all ranks.
    rank_rows: of what an epoch permutes, `rows`.
    index: int64, which of all T·B steps they are, or of B columns those of `Sequences`; None: all.
    entropy: scalar, their share of the mean of π_prox.   observed: by all ranks, for the normaliser, if any.
    """

    rows: Rows | Sequences
    steps: int
    rank_rows: RankRows
    index: Tensor | None
    entropy: Tensor
    observed: Moments | None

    def each(self, of_columns: Tensor, steps: int) -> Tensor:
        """A number of every column, [B], as one of everything that an epoch permutes."""
        every = of_columns if isinstance(self.rows, Sequences) else of_columns.repeat(steps)
        return every if self.index is None else every[self.index]


def prepare(
    policy: Policy,
    network: Network,
    batch: Batch,
    rewards: Tensor,
    group: RankGroup,
    rank_rows: RankRows,
    estimate: Estimate,
    weigh: Weigh,
) -> Prepared:
    """Prepare a rank's share of a batch. rewards: [T, B], scaled where that is asked for.

    rank_rows: by `group`, of the steps that are trained, at least one. There are no rows where none of them
    lies behind the burn-in.
    """
    trained = rank_rows.steps
    steps, columns = batch.valid.shape
    count = steps * columns
    look = see(policy, batch)
    outputs = network.outputs(look.inputs)
    action = {path: values.flatten(0, 1) for path, values in batch.action.items()}
    parameters = outputs.parameters[:count]
    proximal = _log_prob(policy, network, parameters, action)
    behaviour = batch.log_prob.flatten().to(proximal.dtype)
    values, finals = values_of(policy, look, outputs.value, (steps, columns))
    log_ratios = (proximal - behaviour).view(steps, columns)
    unrolls = unrolls_of(batch, rewards.to(values.dtype), values, finals)
    estimated = estimate(unrolls, log_ratios)
    fixed = [estimated.advantage, estimated.target, values[:-1]]
    flat = torch.stack([behaviour, proximal, *(tensor.flatten() for tensor in fixed)])
    entropy = policy.joint_entropy(parameters)
    observed = observed_by(policy, look, batch, group)
    if look.starts is not None:
        return _in_sequences(policy, group, trained, look, weigh, (action, flat, entropy, observed))
    inputs, index = look.inputs.narrow(0, count), None
    if not bool(trained.all()):
        index = trained.flatten().nonzero().squeeze(1)
        inputs, flat, entropy = inputs.select(index), flat[:, index], entropy[index]
        action = {path: rows[index] for path, rows in action.items()}
    # Advantages are standardised over the rows of all ranks.
    rows = Rows(inputs, action, rank_rows.own(_columns(weigh, *rank_rows.gather(flat).unbind(0))))
    mean = entropy.sum().div_(rank_rows.total)
    return Prepared(
        rows=rows, steps=rank_rows.total, rank_rows=rank_rows, index=index, entropy=mean, observed=observed
    )


def _log_prob(policy: Policy, network: Network, parameters: Numbers, action: dict[str, Numbers]) -> Tensor:
    """Log π [n] as gradient steps compute it: the ratio of fresh experience is 1 to the last bit."""
    if not policy.has_slope:
        return policy.joint_log_prob(parameters, action)
    if network.in_arrays:
        action = {path: values.numpy() for path, values in action.items()}
        parameters = parameters.numpy()
    with np.errstate(all="ignore"):
        return torch.as_tensor(policy.closed_form(parameters, action).log_prob)


def _in_sequences(
    policy: Policy,
    group: RankGroup,
    trained: Tensor,
    look: SeenTrajectory,
    weigh: Weigh,
    of_rows: tuple[dict[str, Tensor], Tensor, Tensor, Moments | None],
) -> Prepared:
    """Columns that have a trained step behind the burn-in; of a group of one rank."""
    action, flat, entropy, observed = of_rows
    sequences, index = sequences_of(
        policy, trained, look, action, lambda index: _columns(weigh, *flat[:, index].unbind(0))
    )
    used = torch.from_numpy(sequences.counts.nonzero()[0])
    return Prepared(
        rows=sequences.select(used),
        steps=sequences.steps,
        rank_rows=group.rows_of(torch.from_numpy(sequences.counts > 0).unsqueeze(0)),
        index=used.to(trained.device),
        entropy=entropy[index].mean(),
        observed=observed,
    )


def _columns(
    weigh: Weigh, behaviour: Tensor, proximal: Tensor, advantage: Tensor, target: Tensor, value: Tensor
) -> Tensor:
    surrogate = weigh(behaviour, proximal, advantage)
    return torch.stack([surrogate.anchor, surrogate.weighted_advantage, target, value, behaviour, proximal])
