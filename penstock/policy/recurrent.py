"""Recurrent cores, and how rows lie in time: `Unroll` tells which rows follow one another.

An episode begins with zero state, so each is a sequence of its own, packed and run by torch at once, whatever
the number of resets. Axes: M rows = T steps · B columns, step by step, then K last observations; S sequences;
H size of the state.

    columns in time       sequences                      packed, longest first
    a a a b b b           a0 a1 a2 (+ last of a)         a0 b0 c0 | a1 b1 c1 | a2 b2 | last of a
    c c | d …             b0 b1 b2      …
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from penstock.protocol.spaces import Box, Leaf

Kind = Literal["lstm", "gru"]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of one stretch of time, packed as `torch.nn.utils.rnn.PackedSequence` wants them.

    order: int64 [m], the row at each place.
    sizes: int64 [L] on the CPU, number of sequences that have a step l.
    source: int64 [S], the column whose state a sequence goes on from; B: it begins with zeros.
    last: int64 [B], the newest sequence of each column.
    """

    order: Tensor
    sizes: Tensor
    source: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Unroll:
    """Order of a trajectory's rows in time.

    stretches: one after another in time; all but the last only refresh the state, without gradients.
    back: int64 [M], the place of each row among all stretches.
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

    Args:
        starts: bool [T, B], see `Trajectory.starts`.
        state: by path, [B, H], before row 0.
        burn_in: rows at the start of every column that only refresh its state (Kapturowski et al. 2019).
        final_step: int64 [K], the step that each last observation follows.
        final_slot: int64 [K], its column.
    """
    steps = len(starts)
    edges = [0, burn_in, steps] if 0 < burn_in < steps else [0, steps]
    finals = np.stack([np.asarray(final_step, np.int64), np.asarray(final_slot, np.int64)], 1)
    device = next(iter(state.values())).device
    stretches = tuple(_pack(starts, first, end, finals, device) for first, end in pairwise(edges))
    return Unroll(stretches, torch.argsort(torch.cat([one.order for one in stretches])), state)


def single(state: Mapping[str, Tensor]) -> Unroll:
    """Return one step of M columns that go on from `state`, by path, [M, H]."""
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
    own, behind = length.copy(), np.zeros(len(length), np.int64)
    here = ((finals[:, 0] >= first) & (finals[:, 0] < end)).nonzero()[0]
    followed = number[finals[here, 1], finals[here, 0] - first]
    length[followed] += 1
    behind[followed] = steps * columns + here
    longest = np.argsort(-length, kind="stable")
    place = np.arange(length.max())[:, np.newaxis]
    inside = (first + begin[longest] + place) * columns + column[longest]
    rows = np.where(place < own[longest], inside, behind[longest])
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
    def state(self) -> tuple[tuple[str, Leaf], ...]:
        """Return the leaves of its state by path below `state`."""
        bound = np.full(self.size, np.inf, np.float32)
        return tuple((path, Box(-bound, bound)) for path in self._paths)

    def forward(self, features: Tensor, time: Unroll) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs [M, H] of features [M, F], and the new state."""
        state = [time.state[f"state/{path}"].to(features.dtype) for path in self._paths]
        outputs = []
        for stretch in time.stretches:
            learns = torch.is_grad_enabled() and stretch is time.stretches[-1]
            # cuDNN keeps what backward needs in training mode alone. Without dropout the modes are the same.
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
        """Set orthogonal weights, one gate at a time, and zero biases."""
        with torch.no_grad():
            for name, parameter in self.rnn.named_parameters():
                if name.startswith("bias"):
                    parameter.zero_()
                    continue
                for gate in parameter.split(self.size):
                    nn.init.orthogonal_(gate, 1.0, generator=generator)
