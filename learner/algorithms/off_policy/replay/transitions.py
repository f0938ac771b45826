"""From fragments to n-step transitions; pure functions of one fragment's columns of a batch.

A transition of step t is (o_t, a_t, Σ_{k<m} γ^k r_{t+k}, γ^m or 0, o_{t+m}) with the largest m ≤ n for which
all m steps are of the same episode and in the same fragment (Sutton 1988; Hessel et al. 2018, section
"multi-step learning"):

    the episode *terminated* with step t+m−1               →  the discount is 0, nothing follows
    it was *truncated* there                               →  o_{t+m}: the true final observation, γ^m
    the fragment ends, or the next step is not experience  →  o_{t+m}: the observation after the step, γ^m

So the last n−1 steps of a fragment look less far ahead than the others. That costs nothing in correctness,
since every target is an m-step target of its own; it keeps a transition inside one entry of the log, which
enters and leaves replay whole. Axes: T steps, N columns, K ended episodes, M transitions: the valid steps, by
time and then by column.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.batch import Batch, Source


@dataclass(frozen=True, slots=True)
class Transitions:
    """M transitions, by time and then by column.

    observation, action, following: by path, [M, *shape], raw, with action masks.
    reward: float32 [M], discounted sum over the steps looked ahead.
    discount: float32 [M], the factor of the value of `following`.
    """

    observation: dict[str, Tensor]
    action: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    following: dict[str, Tensor]

    def __len__(self) -> int:
        """Return the number of transitions, M."""
        return len(self.reward)


def fragments(batch: Batch) -> Iterator[tuple[Source, Batch]]:
    """Yield each fragment of a batch by itself, without padding, as views."""
    start = 0
    for source in batch.sources:
        columns = slice(start, start + source.columns)
        start = columns.stop
        yield source, _cut(batch, columns, source.steps)


def _cut(batch: Batch, columns: slice, steps: int) -> Batch:
    mine = (batch.final_slot >= columns.start) & (batch.final_slot < columns.stop)
    return Batch(
        observation={path: rows[: steps + 1, columns] for path, rows in batch.observation.items()},
        action={path: rows[:steps, columns] for path, rows in batch.action.items()},
        reward=batch.reward[:steps, columns],
        terminated=batch.terminated[:steps, columns],
        truncated=batch.truncated[:steps, columns],
        valid=batch.valid[:steps, columns],
        log_prob=batch.log_prob[:steps, columns],
        final_observation={path: rows[mine] for path, rows in batch.final_observation.items()},
        final_slot=batch.final_slot[mine] - columns.start,
        final_step=batch.final_step[mine],
        update=batch.update[columns],
        slots=batch.slots[columns],
    )


def transitions(fragment: Batch, *, discount: float, steps: int) -> Transitions:
    """Return the n-step transitions of one fragment, n = `steps`."""
    ahead = look_ahead(fragment, discount=discount, steps=steps)
    rows = fragment.valid.flatten().nonzero().squeeze(1)
    following = ahead.following.flatten()[rows]
    return Transitions(
        observation={path: part.flatten(0, 1)[rows] for path, part in fragment.observation.items()},
        action={path: part.flatten(0, 1)[rows] for path, part in fragment.action.items()},
        reward=ahead.reward.flatten()[rows],
        discount=ahead.discount.flatten()[rows],
        following={
            path: torch.cat([part.flatten(0, 1), _finals(fragment, path)])[following]
            for path, part in fragment.observation.items()
        },
    )


def _finals(fragment: Batch, path: str) -> Tensor:
    """Return the final observations of a path, [K, *shape].

    No mask is sent with them. What was allowed before the last step stands in for what is allowed after it:
    the value of a truncated step must not be that of an action that is never allowed.
    """
    if path in fragment.final_observation:
        return fragment.final_observation[path]
    return fragment.observation[path][fragment.final_step, fragment.final_slot]


@dataclass(frozen=True, slots=True)
class Ahead:
    """The outcome of looking ahead from each step.

    reward, discount: float32 [T, N].
    following: int64 [T, N], row of [(T+1)·N observations, K final ones].
    """

    reward: Tensor
    discount: Tensor
    following: Tensor


def look_ahead(fragment: Batch, *, discount: float, steps: int) -> Ahead:
    """Return discounted reward, discount and following observation of each step, up to `steps` ahead."""
    length = len(fragment.valid)
    ended = fragment.terminated | fragment.truncated
    goes_on = torch.zeros_like(fragment.valid)
    goes_on[:-1] = fragment.valid[:-1] & fragment.valid[1:] & ~ended[:-1]
    after = _after(fragment)
    kept = discount * (~fragment.terminated).to(fragment.reward.dtype)
    reward, factor, following = fragment.reward.clone(), kept.clone(), after.clone()
    # `reaches` is where a path of k more steps begins; `shifted` brings row t+k to row t.
    reaches = goes_on.clone()
    for k in range(1, min(steps, length)):
        rest = length - k
        here = reaches[:rest]
        reward[:rest] += here * (discount**k) * fragment.reward[k:]
        factor[:rest] = torch.where(here, (discount**k) * kept[k:], factor[:rest])
        following[:rest] = torch.where(here, after[k:], following[:rest])
        reaches[:rest] = here & goes_on[k:]
        reaches[rest:] = False
    return Ahead(reward, factor, following)


def _after(fragment: Batch) -> Tensor:
    """Return the row of the observation that follows each step.

    It is the true final one where the episode ended.
    """
    length, columns = fragment.valid.shape
    rows = torch.arange(length * columns, device=fragment.valid.device) + columns
    after = rows.view(length, columns)
    finals = torch.arange(len(fragment.final_slot), device=after.device) + (length + 1) * columns
    after[fragment.final_step, fragment.final_slot] = finals
    return after
