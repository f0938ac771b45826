"""Frame stacking as policy state: a frame travels once, and each process builds the stack itself.

The stack of a step is its frame behind the `depth` − 1 before it in the same episode, oldest first; before
there are so many the first one is repeated, as `gymnasium.wrappers.FrameStackObservation` does. Part of an
image's stack become its channels, all else one vector. State: `state/frames/PATH`, the last `depth` − 1
frames of each slot, and `state/frames/held`, False where an episode begins. Axes: T steps, B columns, N
slots, K last observations, k = depth; a *frame* is one leaf of an observation, coded by `_frame`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.policy.acting.array_policy import is_image
from penstock.protocol.spaces import (
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    leaves,
)
from penstock.protocol.tensor import Array

# ---- Trajectories that a policy with state learns from: steps in time, and its state before them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """T rows of B columns in time, and K true last observations.

    observation: by path, [T, B, ...], masks among them.
    state: by path, [B, ...], before row 0.
    begins: bool [T, B], the row is the first of an episode.
    ends: bool [T, B], the episode ends with the step (a row fewer will do).
    final_observation: by path, [K, ...]; the one that followed row final_step[k] of column final_slot[k]
        (int64 [K]).
    """

    observation: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    begins: Tensor
    ends: Tensor
    final_observation: Mapping[str, Tensor]
    final_slot: Tensor
    final_step: Tensor

    def starts(self) -> NDArray[np.bool_]:
        """Return bool [T, B] on the CPU: True where a row does not continue the one before it."""
        starts: NDArray[np.bool_] = self.begins.cpu().numpy().copy()
        starts[1:] |= self.ends[: len(starts) - 1].cpu().numpy()
        return starts


def single_step(observation: Mapping[str, Tensor], state: Mapping[str, Tensor], held: Tensor) -> Trajectory:
    """Return one row of M columns, [M, ...] each; held: bool [M], False where an episode begins."""
    none = held.new_zeros(0, dtype=torch.int64)
    return Trajectory(
        observation={path: value.unsqueeze(0) for path, value in observation.items()},
        state=state,
        begins=~held.unsqueeze(0),
        ends=torch.zeros_like(held).unsqueeze(0),
        final_observation={path: value[:0] for path, value in observation.items()},
        final_slot=none,
        final_step=none,
    )


HELD: Final = "state/frames/held"


class FrameStack:
    """Builds the stacks that the network reads.

    space: space of the stacked observation.
    state: leaves of the state by path below `state`.
    """

    def __init__(self, space: Space, depth: int) -> None:
        self.depth = depth
        self._leaves = list(leaves(space, "observation"))
        self.space = _stacked_space(space, depth) if depth > 1 else space
        self.state: tuple[tuple[str, Leaf], ...] = ()
        if depth > 1:
            kept = [(f"frames/{name}", _joined(leaf, depth - 1)) for name, leaf in self._leaves]
            flag = Box(np.zeros((), np.bool_), np.ones((), np.bool_))
            self.state = (*kept, ("frames/held", flag))

    def push(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the stacks [N, ...] of a step by path, and the state after it."""
        seen: dict[str, Any] = {}
        state: dict[str, Array] = {}
        for name, leaf in self._leaves:
            frame = _frame(leaf, np.asarray(row[name]))
            stack = np.repeat(frame[:, np.newaxis], self.depth, 1)
            if HELD in row:
                held: Any = row[HELD]
                past: Any = row[f"state/frames/{name}"]
                stack[held, :-1] = past[held].reshape(-1, self.depth - 1, *frame.shape[1:])
            seen[name] = _arranged(leaf, stack)
            state[f"state/frames/{name}"] = stack[:, 1:].reshape(
                len(frame), *_joined(leaf, self.depth - 1).shape
            )
        state[HELD] = np.ones(len(frame), np.bool_)
        return seen, state

    def unroll(self, seen: Trajectory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the stacks of every step [T, B, ...] and of the last observations [K, ...], by path."""
        rows, lasts = self.sources(seen.begins, seen.final_step, seen.final_slot)
        columns = torch.arange(seen.begins.shape[1], device=seen.begins.device)
        observation, final = {}, {}
        for name, leaf in self._leaves:
            frames = _frame(leaf, seen.observation[name])
            past = seen.state[f"state/frames/{name}"].view(len(columns), self.depth - 1, *frames.shape[2:])
            known = torch.cat([past.swapaxes(0, 1), frames])
            observation[name] = _arranged(leaf, known[rows, columns[:, None]])
            newest = _frame(leaf, seen.final_observation[name])[:, None]
            stack = torch.cat([known[lasts, seen.final_slot[:, None]], newest], 1)
            final[name] = _arranged(leaf, stack)
        return observation, final

    def sources(self, begins: Tensor, final_step: Tensor, final_slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each frame of a stack behind the k − 1 of the state."""
        before = self.depth - 1
        step = torch.arange(len(begins), device=begins.device)
        # The row in which the episode began; the oldest frame of the state where it began before row 0.
        first = torch.where(begins, step[:, None], -before).cummax(0).values
        age = torch.arange(before, -1, -1, device=step.device)
        rows = torch.maximum(step[:, None, None] - age, first[..., None])
        began = first[final_step, final_slot]
        lasts = torch.maximum(final_step[:, None] + 1 - age[:-1], began[:, None])
        return rows + before, lasts + before

    def past(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the frames of a state by path, as they were observed, [k − 1, B, *shape], oldest first."""
        found = {}
        for name, leaf in self._leaves:
            kept = state[f"state/frames/{name}"]
            frames = kept.view(len(kept), self.depth - 1, *leaf.shape).swapaxes(0, 1)
            found[name] = frames + leaf.start if isinstance(leaf, Discrete) else frames
        return found

    def row(self, stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the row of M single steps that a policy reads, with the state before them."""
        row = {path: stack[:, -1] for path, stack in stacks.items()}
        if self.depth == 1:
            return row
        for name, leaf in self._leaves:
            before = _frame(leaf, stacks[name][:, :-1])
            row[f"state/frames/{name}"] = before.reshape(len(before), *_joined(leaf, self.depth - 1).shape)
            row[HELD] = torch.ones(len(before), dtype=torch.bool, device=before.device)
        return row


def _frame(leaf: Leaf, value: Any) -> Any:
    if isinstance(leaf, Discrete):
        value = value - leaf.start
    return value if leaf.shape else value[..., None]


def _joined(leaf: Leaf, count: int) -> Leaf:
    match leaf:
        case Discrete():
            return MultiDiscrete((leaf.n,) * count)
        case MultiDiscrete():
            return MultiDiscrete(leaf.nvec * count)
        case MultiBinary():
            return MultiBinary(leaf.n * count)
        case Box():
            return Box(np.stack([leaf.low] * count), np.stack([leaf.high] * count))


def _arranged(leaf: Leaf, stack: Any) -> Any:
    """Return frames [..., k, *frame] as the network reads them; arrays or tensors."""
    shape = leaf.shape or (1,)
    *lead, depth = stack.shape[: stack.ndim - len(shape)]
    if not is_image(leaf):
        return stack.reshape(*lead, depth * math.prod(shape))
    if len(shape) == 2:
        return stack
    if shape[0] < shape[-1]:
        return stack.reshape(*lead, depth * shape[0], *shape[1:])
    return stack.swapaxes(-4, -3).swapaxes(-3, -2).reshape(*lead, *shape[:2], depth * shape[2])


def _stacked_leaf(path: str, leaf: Leaf, depth: int) -> Leaf:
    if not isinstance(leaf, Box):
        return _joined(leaf, depth)
    low, high = (_arranged(leaf, np.stack([_frame(leaf, bound)] * depth)) for bound in (leaf.low, leaf.high))
    stacked = Box(low, high)
    if is_image(leaf) and len(leaf.shape) == 3:
        was_first, is_first = (shape[0] < shape[-1] for shape in (leaf.shape, stacked.shape))
        if was_first != is_first:
            raise ValueError(
                f"policy.frame_stack={depth}: {path} {leaf!r} would have {math.prod(stacked.shape)} numbers "
                f"in {stacked.shape}, which no longer says where its channels are; stack fewer frames"
            )
    return stacked


def _stacked_space(space: Space, depth: int, path: str = "observation") -> Space:
    match space:
        case Dict():
            parts = [(key, _stacked_space(part, depth, f"{path}/{key}")) for key, part in space.spaces]
            return Dict(tuple(parts))
        case Tuple():
            return Tuple(
                tuple(_stacked_space(part, depth, f"{path}/{i}") for i, part in enumerate(space.spaces))
            )
        case _:
            return _stacked_leaf(path, space, depth)
