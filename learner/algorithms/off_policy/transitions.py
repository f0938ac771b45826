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

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.learner.batch import Batch
from penstock.policy.recurrent import FrameStack


@dataclass(frozen=True, slots=True)
class Transitions:
    """M transitions, as a policy reads them.

    observation, following: by path, [M, *shape], raw, with action masks, and with the state before them where
        the policy stacks frames.
    action: by path, [M, *shape].
    reward: float32 [M], discounted sum over the steps looked ahead.
    discount: float32 [M], the factor of the value of `following`.
    """

    observation: dict[str, Tensor]
    action: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    following: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True, slots=True)
class Steps:
    """M transitions of one fragment, by time and then by column, over its F frames.

    frames: observations and action masks by path, raw, [F, *shape], each once.
    before, after: int64 [M, k], the frames of the stack of `observation` and of `following`, oldest first.
    action, reward, discount: see `Transitions`.
    """

    frames: dict[str, Tensor]
    before: Tensor
    after: Tensor
    action: dict[str, Tensor]
    reward: Tensor
    discount: Tensor

    def __len__(self) -> int:
        return len(self.reward)

    def read(self, stack: FrameStack) -> Transitions:
        before, after = (
            {path: frames[rows] for path, frames in self.frames.items()} for rows in (self.before, self.after)
        )
        return Transitions(stack.row(before), self.action, self.reward, self.discount, stack.row(after))


def transitions(fragment: Batch, stack: FrameStack, *, discount: float, steps: int) -> Steps:
    reward, factor, following = _look_ahead(fragment, discount, steps)
    rows = fragment.valid.flatten().nonzero().squeeze(1)
    stacks = _stacks(fragment, stack)
    past = stack.past(fragment.state) if stack.depth > 1 else {}
    return Steps(
        frames={
            path: torch.cat([part.flatten(0, 1), _finals(fragment, path), *_before(path, part, past, stack)])
            for path, part in fragment.observation.items()
        },
        before=stacks[rows],
        after=stacks[following[rows]],
        action={path: part.flatten(0, 1)[rows] for path, part in fragment.action.items()},
        reward=reward[rows],
        discount=factor[rows],
    )


def _stacks(fragment: Batch, stack: FrameStack) -> Tensor:
    """Return the frames of the stack of each observation, int64 [(T+1)·N + K, k], the final ones behind.

    Frames are numbered as in `Steps`: observations, final observations, then those of the state before row 0.
    """
    length, columns = fragment.valid.shape
    finals, observed = len(fragment.final_slot), (length + 1) * columns
    device = fragment.valid.device
    if stack.depth == 1:
        return torch.arange(observed + finals, device=device)[:, None]
    assert fragment.begins is not None, "fragments of a policy with state say where episodes begin"
    rows, lasts = stack.sources(fragment.begins, fragment.final_step, fragment.final_slot)
    own = torch.arange(columns, device=device)[:, None]
    known = torch.cat(
        [
            torch.arange((stack.depth - 1) * columns, device=device) + observed + finals,
            torch.arange(observed, device=device),
        ]
    ).view(-1, columns)
    newest = torch.arange(observed, observed + finals, device=device)[:, None]
    ended = torch.cat([known[lasts, fragment.final_slot[:, None]], newest], 1)
    return torch.cat([known[rows, own].flatten(0, 1), ended])


def _before(path: str, part: Tensor, past: dict[str, Tensor], stack: FrameStack) -> list[Tensor]:
    """Return the frames of the state, [(k − 1)·N, *shape]; of a mask, which has none, as many zeros."""
    if stack.depth == 1:
        return []
    none = part.new_zeros((stack.depth - 1, *part.shape[1:]))
    return [past.get(path, none).to(part.dtype).flatten(0, 1)]


def _finals(fragment: Batch, path: str) -> Tensor:
    """Return the final observations of a path, [K, *shape].

    Where no mask is known, what was allowed before the last step stands in for what is allowed after it: the
    value of a truncated step must not be that of an action that is never allowed.
    """
    for found in (fragment.final_observation, fragment.final_mask):
        if path in found:
            return found[path]
    return fragment.observation[path][fragment.final_step, fragment.final_slot]


def _look_ahead(fragment: Batch, discount: float, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return discounted reward and discount of each step, float32 [T·N], and what follows it.

    What follows: int64 [T·N], row of [(T+1)·N observations, K final ones].
    """
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
    return reward.flatten(), factor.flatten(), following.flatten()


def _after(fragment: Batch) -> Tensor:
    length, columns = fragment.valid.shape
    rows = torch.arange(length * columns, device=fragment.valid.device) + columns
    after = rows.view(length, columns)
    finals = torch.arange(len(fragment.final_slot), device=after.device) + (length + 1) * columns
    after[fragment.final_step, fragment.final_slot] = finals
    return after
