"""Policies with state: trajectories, stacks of frames, and recurrent cores.

Axes: T steps, B columns, N slots, K last observations, M rows = T · B, step by step, then the K; S sequences;
H size of a core's state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from penstock.policy.acting.array_policy import is_image
from penstock.protocol import spaces
from penstock.protocol.tensor import Array

# ---- Trajectories that a policy with state learns from.


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


# ---- Frame stacking: each frame is sent once, and each process builds the stacks.
#
# The stack of a step is its frame after the `depth` − 1 frames before it in the episode, oldest first; before
# there are so many the first one is repeated, as `gymnasium.wrappers.FrameStackObservation` does. State:
# `state/frames/PATH`, the last `depth` − 1 frames of each slot, and `state/frames/held`, False where an
# episode begins. k = depth; a *frame* is one leaf of an observation, coded by `_frame`.

HELD: Final = "state/frames/held"


class FrameStack:
    """Builds the stacks of `space` that the network reads. state: its leaves by path below `state`."""

    def __init__(self, space: spaces.Space, depth: int) -> None:
        self.depth = depth
        self._leaves = list(spaces.leaves(space, "observation"))
        self.space = _stacked_space(space, depth) if depth > 1 else space
        self.state: tuple[tuple[str, spaces.Leaf], ...] = ()
        if depth > 1:
            kept = [(f"frames/{name}", _joined(leaf, depth - 1)) for name, leaf in self._leaves]
            flag = spaces.Box(np.zeros((), np.bool_), np.ones((), np.bool_))
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
        """Return the indices of the frames of each stack, in the frames of state and trajectory together."""
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
            found[name] = frames + leaf.start if isinstance(leaf, spaces.Discrete) else frames
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


def _frame(leaf: spaces.Leaf, value: Any) -> Any:
    if isinstance(leaf, spaces.Discrete):
        value = value - leaf.start
    return value if leaf.shape else value[..., None]


def _joined(leaf: spaces.Leaf, count: int) -> spaces.Leaf:
    match leaf:
        case spaces.Discrete():
            return spaces.MultiDiscrete((leaf.n,) * count)
        case spaces.MultiDiscrete():
            return spaces.MultiDiscrete(leaf.nvec * count)
        case spaces.MultiBinary():
            return spaces.MultiBinary(leaf.n * count)
        case spaces.Box():
            return spaces.Box(np.stack([leaf.low] * count), np.stack([leaf.high] * count))


def _arranged(leaf: spaces.Leaf, stack: Any) -> Any:
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


def _stacked_leaf(path: str, leaf: spaces.Leaf, depth: int) -> spaces.Leaf:
    if not isinstance(leaf, spaces.Box):
        return _joined(leaf, depth)
    low, high = (_arranged(leaf, np.stack([_frame(leaf, bound)] * depth)) for bound in (leaf.low, leaf.high))
    stacked = spaces.Box(low, high)
    if is_image(leaf) and len(leaf.shape) == 3:
        was_first, is_first = (shape[0] < shape[-1] for shape in (leaf.shape, stacked.shape))
        if was_first != is_first:
            raise ValueError(
                f"policy.frame_stack={depth}: {path} {leaf!r} would have {math.prod(stacked.shape)} numbers "
                f"in {stacked.shape}, which no longer says where its channels are; stack fewer frames"
            )
    return stacked


def _stacked_space(space: spaces.Space, depth: int, path: str = "observation") -> spaces.Space:
    match space:
        case spaces.Dict():
            parts = [(key, _stacked_space(part, depth, f"{path}/{key}")) for key, part in space.spaces]
            return spaces.Dict(tuple(parts))
        case spaces.Tuple():
            return spaces.Tuple(
                tuple(_stacked_space(part, depth, f"{path}/{i}") for i, part in enumerate(space.spaces))
            )
        case _:
            return _stacked_leaf(path, space, depth)


# ---- Recurrent cores. An episode begins with zero state, so each is one sequence, packed and run by
# torch at once, whatever the number of resets:
#
#     columns in time       sequences                      packed, longest first
#     a a a b b b           a0 a1 a2 (+ last of a)         a0 b0 c0 | a1 b1 c1 | a2 b2 | last of a
#     c c | d …             b0 b1 b2      …

Kind = Literal["lstm", "gru"]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of one stretch of time, packed as `torch.nn.utils.rnn.PackedSequence` wants them.

    order: int64 [m], the row at each position.
    sizes: int64 [L] on the CPU, number of sequences with a step l.
    source: int64 [S], the column whose state a sequence continues; B: it begins with zeros.
    last: int64 [B], the newest sequence of each column.
    """

    order: Tensor
    sizes: Tensor
    source: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Unroll:
    """Order of a trajectory's rows in time.

    stretches: consecutive in time; all but the last only refresh the state, without gradients.
    back: int64 [M], the position of each row in the concatenated stretches.
    state: by path, [B, H], before row 0.
    """

    stretches: tuple[Packed, ...]
    back: Tensor
    state: Mapping[str, Tensor]


def unroll(
    starts: NDArray[np.bool_],
    state: Mapping[str, Tensor],
    *,
    burn_in: int = 0,
    final_step: Sequence[int] | Index = (),
    final_slot: Sequence[int] | Index = (),
) -> Unroll:
    """Return how the rows of a trajectory follow one another.

    starts: bool [T, B], see `Trajectory.starts`. state: by path, [B, H], before row 0. burn_in: rows at the
    start of every column that only refresh its state (Kapturowski et al. 2019). final_step, final_slot: int64
    [K], step and column that each last observation follows.
    """
    steps = len(starts)
    edges = [0, burn_in, steps] if 0 < burn_in < steps else [0, steps]
    finals = np.stack([np.asarray(final_step, np.int64), np.asarray(final_slot, np.int64)], 1)
    device = next(iter(state.values())).device
    stretches = tuple(_pack(starts, first, end, finals, device) for first, end in pairwise(edges))
    return Unroll(stretches, torch.argsort(torch.cat([one.order for one in stretches])), state)


def single(state: Mapping[str, Tensor]) -> Unroll:
    """Return one step of M columns that continue `state`, by path, [M, H]."""
    some = next(iter(state.values()))
    every = torch.arange(len(some), device=some.device)
    sizes = torch.tensor([len(some)])
    return Unroll((Packed(every, sizes, every, every),), every, state)


def _pack(starts: NDArray[np.bool_], first: int, end: int, finals: Index, device: torch.device) -> Packed:
    """Pack the sequences of rows first ≤ t < end."""
    steps, columns = starts.shape
    opens = starts[first:end].copy()
    opens[0] = True
    column, begin = opens.T.nonzero()
    goes_on = np.append(column[1:] == column[:-1], False)
    length = np.where(goes_on, np.append(begin[1:], 0), end - first) - begin
    number = opens.T.cumsum().reshape(columns, end - first) - 1  # sequence of each [B, t]
    own, appended = length.copy(), np.zeros(len(length), np.int64)
    here = ((finals[:, 0] >= first) & (finals[:, 0] < end)).nonzero()[0]
    followed = number[finals[here, 1], finals[here, 0] - first]
    length[followed] += 1
    appended[followed] = steps * columns + here
    longest = np.argsort(-length, kind="stable")
    place = np.arange(length.max())[:, np.newaxis]
    inside = (first + begin[longest] + place) * columns + column[longest]
    rows = np.where(place < own[longest], inside, appended[longest])
    is_there = place < length[longest]
    source = np.where((begin == 0) & ~starts[first, column], column, columns)
    rank = np.argsort(longest)
    as_tensors = (rows[is_there], source[longest], rank[number[:, -1]])
    order, source_, last = (
        torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True) for a in as_tensors
    )
    return Packed(order, torch.from_numpy(is_there.sum(1)), source_, last)


class Core(nn.Module):
    """An LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) between a body and its heads.

    name: of its state, `state/NAME/h` and for an LSTM `state/NAME/c`, float32 [N, H].
    kind: LSTM or GRU.
    width: features that it reads.
    size: H.
    """

    def __init__(self, name: str, kind: Kind, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.rnn: nn.LSTM | nn.GRU = (nn.LSTM if kind == "lstm" else nn.GRU)(width, size)
        self._paths = [f"{name}/{part}" for part in (("h", "c") if kind == "lstm" else ("h",))]

    @property
    def state(self) -> tuple[tuple[str, spaces.Leaf], ...]:
        bound = np.full(self.size, np.inf, np.float32)
        return tuple((path, spaces.Box(-bound, bound)) for path in self._paths)

    def forward(self, features: Tensor, time: Unroll) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs [M, H] of features [M, F], and the new state."""
        state = [time.state[f"state/{path}"].to(features.dtype) for path in self._paths]
        outputs = []
        for stretch in time.stretches:
            learns = torch.is_grad_enabled() and stretch is time.stretches[-1]
            # cuDNN supports backward in training mode alone. Without dropout the modes are the same.
            self.rnn.train(learns)
            with torch.set_grad_enabled(learns):
                output, ends = self._run(features, stretch, state)
            outputs.append(output)
            state = [end.index_select(0, stretch.last) for end in ends]
        names = [f"state/{path}" for path in self._paths]
        return torch.cat(outputs).index_select(0, time.back), dict(zip(names, state, strict=True))

    def _run(self, features: Tensor, stretch: Packed, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        zero = [torch.cat([one, one.new_zeros(1, self.size)]) for one in state]
        begun = [one.index_select(0, stretch.source).unsqueeze(0) for one in zero]
        packed = PackedSequence(features.index_select(0, stretch.order), stretch.sizes)
        given: Any = tuple(begun) if len(begun) > 1 else begun[0]
        output, ended = self.rnn(packed, given)
        every = ended if isinstance(ended, tuple) else (ended,)
        return output.data, [one.squeeze(0) for one in every]

    def initialise(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            for name, parameter in self.rnn.named_parameters():
                if name.startswith("bias"):
                    parameter.zero_()
                    continue
                for gate in parameter.split(self.size):
                    nn.init.orthogonal_(gate, 1.0, generator=generator)
