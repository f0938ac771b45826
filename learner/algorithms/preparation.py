"""What is computed once per batch, before its epochs: values, π_prox, advantages, the fixed surrogate.

Everything that later minibatches need lies in `Rows`: the valid steps, flat, in an order that the
epochs permute; for a recurrent policy in `Sequences`, whose columns they permute whole. Called without gradients.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.algorithms.advantage import Advantages, carries, gae, next_values, vtrace
from learner.algorithms.loss import Surrogate, coupled, decoupled, standardise
from learner.algorithms.network import Network
from learner.algorithms.rows import Rows
from learner.algorithms.sequences import Sequences, in_columns
from learner.batch import Batch
from penstock.policy.memory import Look
from penstock.policy.normaliser import Moments, moments
from penstock.policy.policy import Policy
from penstock.policy.trajectory import Trajectory
from penstock.runtime.settings import AlgorithmSection

__all__ = ["Prepared", "Rows", "Sequences", "estimate", "prepare"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """rows: of the batch.   entropy: scalar, mean of π_prox.   observed: for the normaliser, if any."""

    rows: Rows | Sequences
    entropy: Tensor
    observed: Moments | None


def prepare(
    policy: Policy, network: Network, section: AlgorithmSection, batch: Batch, rewards: Tensor
) -> Prepared:
    """Prepare a batch with at least one valid step. rewards: [T, B], scaled where that is asked for.

    Its rows are empty where no valid step lies behind the burn-in.
    """
    steps, columns = batch.valid.shape
    count = steps * columns
    look = see(policy, batch)
    outputs = network.outputs(look.inputs)
    action = {path: values.flatten(0, 1) for path, values in batch.action.items()}
    parameters = outputs.parameters[:count]
    proximal = policy.joint_log_prob(parameters, action)
    behaviour = batch.log_prob.flatten().to(proximal.dtype)
    values = outputs.value[: count + columns].view(steps + 1, columns)
    finals = outputs.value[count + columns :] if look.lasts is None else policy.value_of(look.lasts)
    log_ratios = (proximal - behaviour).view(steps, columns)
    estimated = estimate(section, batch, rewards.to(values.dtype), values, finals, log_ratios)
    fixed = [estimated.advantage, estimated.target, values[:-1]]
    flat = torch.stack([behaviour, proximal, *(tensor.flatten() for tensor in fixed)])
    entropy = policy.joint_entropy(parameters)
    observed = _observed(policy, look, batch)
    if look.starts is not None:
        return _in_sequences(policy, section, batch, look, (action, flat, entropy, observed))
    inputs = look.inputs.narrow(0, count)
    if not bool(batch.valid.all()):
        index = batch.valid.flatten().nonzero().squeeze(1)
        inputs, flat, entropy = inputs.select(index), flat[:, index], entropy[index]
        action = {path: rows[index] for path, rows in action.items()}
    return Prepared(Rows(inputs, action, _columns(section, *flat.unbind(0))), entropy.mean(), observed)


def see(policy: Policy, batch: Batch) -> Look:
    """Inputs of every observation of a batch, each with what the policy remembers before it."""
    if batch.begins is None:
        lasts = policy.read(batch.final_observation) if len(batch.final_slot) else None
        return Look(batch.observation, policy.read(batch.observation), lasts)
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
    section: AlgorithmSection,
    batch: Batch,
    look: Look,
    of_rows: tuple[dict[str, Tensor], Tensor, Tensor, Moments | None],
) -> Prepared:
    """Columns that have a valid step behind the burn-in."""
    assert look.starts is not None
    assert look.inputs.time is not None
    action, flat, entropy, observed = of_rows
    steps = len(batch.valid)
    kept = batch.valid.clone()
    kept[: policy.memory.burn_in] = False
    index, step, counts = in_columns(kept)
    inputs = look.inputs.narrow(0, batch.valid.numel())
    if inputs.forbidden is not None:
        inputs = replace(inputs, forbidden=inputs.forbidden[index])
    sequences = Sequences(
        inputs=inputs,
        action={path: rows[index] for path, rows in action.items()},
        columns=_columns(section, *flat[:, index].unbind(0)),
        starts=look.starts[:steps],
        state=look.inputs.time.state,
        step=step,
        counts=counts,
        burn_in=policy.memory.burn_in,
    )
    used = sequences.select(torch.from_numpy(counts.nonzero()[0]))
    return Prepared(used, entropy[index].mean(), observed)


def estimate(
    section: AlgorithmSection,
    batch: Batch,
    rewards: Tensor,
    values: Tensor,
    finals: Tensor,
    log_ratios: Tensor,
) -> Advantages:
    """Advantages and targets [T, B]. values: [T+1, B]; finals: [K], of the last observations; log_ratios: log π_prox/μ, [T, B]."""
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


def _observed(policy: Policy, look: Look, batch: Batch) -> Moments | None:
    if policy.normaliser is None:
        return None
    reals = policy.reader.raw_reals(look.observation, torch.float64)
    return moments(reals[: batch.valid.numel()][batch.valid.flatten()])
