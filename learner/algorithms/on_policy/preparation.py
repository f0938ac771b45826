"""What is computed once per batch, before its epochs: values, π_prox, advantages, the fixed surrogate.

Everything that later minibatches need lies in `Rows`: the valid steps, flat, in an order that the
epochs permute; for a recurrent policy in `Sequences`, whose columns they permute whole. Called without
gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.algorithms.fast.network import Network
from learner.algorithms.on_policy.rows import Rows
from learner.algorithms.on_policy.sequences import Sequences, in_columns
from learner.algorithms.shared.advantage import Advantages, Unrolls, carries, next_values
from learner.algorithms.shared.loss import Surrogate
from learner.algorithms.shared.rank_group import RankGroup, RankRows
from learner.batch import Batch
from penstock.policy.memory import SeenTrajectory
from penstock.policy.normaliser import Moments, moments
from penstock.policy.policy import Policy
from penstock.policy.trajectory import Trajectory

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
    proximal = policy.joint_log_prob(parameters, action)
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


def values_of(
    policy: Policy, look: SeenTrajectory, value: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return V of every observation, [T+1, B], and of the last ones, [K].

    value: of `look.inputs`. shape: (T, B).
    """
    steps, columns = shape
    behind = (steps + 1) * columns
    finals = value[behind:] if look.lasts is None else policy.value_of(look.lasts)
    return value[:behind].view(steps + 1, columns), finals


def see(policy: Policy, batch: Batch) -> SeenTrajectory:
    """Inputs of every observation of a batch, each with what the policy remembers before it."""
    if batch.begins is None:
        lasts = policy.read(batch.final_observation) if len(batch.final_slot) else None
        return SeenTrajectory(batch.observation, policy.read(batch.observation), lasts)
    return policy.look(
        Trajectory(
            observation=batch.observation,
            state=batch.state,
            begins=batch.begins,
            ends=batch.terminated | batch.truncated,
            final_observation=batch.final_observation,
            final_slot=batch.final_slot,
            final_step=batch.final_step,
        )
    )


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


def sequences_of(
    policy: Policy,
    trained: Tensor,
    look: SeenTrajectory,
    action: Mapping[str, Tensor],
    columns: Callable[[Tensor], Tensor],
) -> tuple[Sequences, Tensor]:
    """Return all columns of a recurrent policy's batch, and which of its T·B steps carry loss, int64 [n].

    trained: bool [T, B]; of these the steps behind the burn-in carry loss. action: by path, [T·B, *shape].
    columns: given that index, those of `Steps`, [6, n].
    """
    assert look.starts is not None
    assert look.inputs.time is not None
    kept = trained.clone()
    kept[: policy.memory.burn_in] = False
    index, step, counts = in_columns(kept)
    inputs = look.inputs.narrow(0, trained.numel())
    if inputs.forbidden is not None:
        inputs = replace(inputs, forbidden=inputs.forbidden[index])
    sequences = Sequences(
        inputs=inputs,
        action={path: rows[index] for path, rows in action.items()},
        columns=columns(index),
        starts=look.starts[: len(trained)],
        state=look.inputs.time.state,
        step=step,
        counts=counts,
        burn_in=policy.memory.burn_in,
    )
    return sequences, index


def unrolls_of(batch: Batch, rewards: Tensor, values: Tensor, finals: Tensor) -> Unrolls:
    """What estimators take. rewards: [T, B]; values: [T+1, B]; finals: [K], of the last observations."""
    following = next_values(values, batch.terminated, batch.final_slot, batch.final_step, finals)
    carried = carries(batch.terminated, batch.truncated, batch.valid)
    return Unrolls(rewards, values[:-1], following, carried, batch.valid)


def _columns(
    weigh: Weigh, behaviour: Tensor, proximal: Tensor, advantage: Tensor, target: Tensor, value: Tensor
) -> Tensor:
    surrogate = weigh(behaviour, proximal, advantage)
    return torch.stack([surrogate.anchor, surrogate.weighted_advantage, target, value, behaviour, proximal])


def observed_by(policy: Policy, look: SeenTrajectory, batch: Batch, group: RankGroup) -> Moments | None:
    """Moments of the observations of valid steps, of all ranks; None for a policy without a normaliser."""
    if policy.normaliser is None:
        return None
    reals = policy.reader.raw_reals(look.observation, torch.float64)
    return group.moments(moments(reals[: batch.valid.numel()][batch.valid.flatten()]))
