"""A batch as its policy sees it, and what families that learn from whole trajectories read of it.

Each observation comes with what the policy remembers before it. Values become unrolls for an estimator, and
the steps of a policy that remembers become columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from penstock.learner.algorithms.shared.advantage import Unrolls, carries, next_values
from penstock.learner.algorithms.shared.rank_group import RankGroup
from penstock.learner.algorithms.shared.sequences import Sequences, in_columns
from penstock.learner.batch import Batch
from penstock.policy.memory import SeenTrajectory
from penstock.policy.normaliser import Moments
from penstock.policy.policy import Policy
from penstock.policy.trajectory import Trajectory


def see(policy: Policy, batch: Batch) -> SeenTrajectory:
    """Inputs of every observation of a batch, each with what the policy remembers before it."""
    if batch.begins is None:
        lasts = policy.read(batch.final_observation) if len(batch.final_slot) else None
        return SeenTrajectory(batch.observation, policy.read(batch.observation), lasts)
    return policy.look(trajectory_of(batch))


def trajectory_of(batch: Batch) -> Trajectory:
    """Return the batch of a policy that remembers, in time."""
    assert batch.begins is not None, "a policy that remembers sends where episodes begin"
    return Trajectory(
        observation=batch.observation,
        state=batch.state,
        begins=batch.begins,
        ends=batch.terminated | batch.truncated,
        final_observation=batch.final_observation,
        final_slot=batch.final_slot,
        final_step=batch.final_step,
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
    """Return what estimators take. rewards: [T, B]. values: [T+1, B]. finals: [K]."""
    following = next_values(values, batch.terminated, batch.final_slot, batch.final_step, finals)
    carried = carries(batch.terminated, batch.truncated, batch.valid)
    return Unrolls(rewards, values[:-1], following, carried, batch.valid)


def observed_by(policy: Policy, look: SeenTrajectory, batch: Batch, group: RankGroup) -> Moments | None:
    """Moments of the observations of valid steps, of all ranks; None for a policy without a normaliser."""
    if policy.normaliser is None:
        return None
    reals = policy.reader.raw_reals(look.observation, torch.float64)
    return group.moments(policy.normaliser.observe(reals[: batch.valid.numel()][batch.valid.flatten()]))
