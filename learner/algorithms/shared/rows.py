"""Steps of a batch as the losses read them: flat, without those that are not experience."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.learner.batch import send
from penstock.policy.distributions import Numbers
from penstock.policy.networks import Inputs
from penstock.policy.recurrent import unroll

# ---- Steps as losses read them: six numbers each, in columns of a tensor or of an array.


class Steps:
    """n valid steps. columns: [6, n], by these names."""

    __slots__ = ()
    columns: Numbers

    @property
    def steps(self) -> int:
        """Return how many steps there are (n)."""
        return int(self.columns.shape[1])

    @property
    def anchor(self) -> Numbers:
        """Return the log-probability that the ratio is taken to, [n]."""
        return self.columns[0]

    @property
    def weighted_advantage(self) -> Numbers:
        """Return advantage times behaviour weight, [n]."""
        return self.columns[1]

    @property
    def target(self) -> Numbers:
        """Return the value that the critic is drawn to, [n]."""
        return self.columns[2]

    @property
    def old_value(self) -> Numbers:
        """Return V at the start of the batch, [n]."""
        return self.columns[3]

    @property
    def behaviour(self) -> Numbers:
        """Return log μ(a|s) under the behaviour policy, [n]."""
        return self.columns[4]

    @property
    def proximal(self) -> Numbers:
        """Return log π_prox(a|s) under the proximal policy, [n]."""
        return self.columns[5]


@dataclass(frozen=True, slots=True)
class AllRankSteps(Steps):
    """Holds the steps of all ranks together, after an epoch. columns: [6, n], as of `Steps`."""

    columns: Tensor


@dataclass(frozen=True, slots=True)
class Rows(Steps):
    """Steps that stand alone, or of one minibatch.

    inputs: they give [n] outputs.   action: by path, [n, *shape].
    whole: rows of all ranks in the minibatch, where these may be one rank's share of them.
    """

    inputs: Inputs
    action: dict[str, Numbers]
    columns: Numbers
    whole: int | None = None

    @property
    def total(self) -> int:
        """Return the number of rows that a mean over the minibatch divides by."""
        return self.steps if self.whole is None else self.whole

    def __len__(self) -> int:
        """Return what an epoch permutes: steps (n)."""
        return self.steps

    def alone(self) -> Inputs:
        """Inputs of the steps, [n]."""
        return self.inputs

    def select(self, index: Tensor) -> "Rows":
        """Return the rows at an int64 index [m] on the CPU, copied."""
        index = send(index, self.columns.device)
        action = {path: values.index_select(0, index) for path, values in self.action.items()}
        return Rows(self.inputs.select(index), action, self.columns.index_select(1, index))

    def in_arrays(self) -> "Rows":
        """Return these rows, which lie on the CPU, with actions and columns as arrays of the same memory."""
        action = {path: values.numpy() for path, values in self.action.items()}
        return replace(self, action=action, columns=self.columns.numpy())

    def cut(self, sizes: Sequence[tuple[int, int]]) -> Iterator["Rows"]:
        """Yield minibatches of the n rows in order, as views, [m] rows each.

        sizes: of each, rows of this rank and of all (`rank_group.MinibatchSplit`).
        """
        start = 0
        for own, total in sizes:
            end = start + own
            action = {path: values[start:end] for path, values in self.action.items()}
            yield Rows(self.inputs.narrow(start, own), action, self.columns[:, start:end], total)
            start = end


# ---- Steps of a recurrent policy.

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences(Steps):
    """B columns of T steps, n of them with loss, those of a column behind one another in order of time.

    inputs: [T·B, ...], step by step; only `forbidden` is [n, P].
    action: by path, [n, *shape].   columns: [6, n].
    starts: bool [T, B], the row goes on from no other.   state: by path, [B, H], before row 0.
    step: int64 [n], its row t.   counts: int64 [B], steps of each column.   burn_in: rows without loss.
    """

    inputs: Inputs
    action: dict[str, Tensor]
    columns: Tensor
    starts: NDArray[np.bool_]
    state: Mapping[str, Tensor]
    step: Index
    counts: Index
    burn_in: int

    def __len__(self) -> int:
        """Return what an epoch permutes: columns (B)."""
        return len(self.counts)

    def alone(self) -> Inputs:
        """Inputs of the steps with loss, [n], as if none followed another."""
        index = torch.from_numpy(_place(self.step, self.counts)).to(self.columns.device)
        images = tuple(image.index_select(0, index) for image in self.inputs.images)
        return Inputs(self.inputs.vector.index_select(0, index), images)

    def select(self, order: Tensor) -> "Sequences":
        """Return the columns at an int64 index [b] on the CPU, copied."""
        chosen: Index = order.numpy()
        counts = self.counts[chosen]
        first = np.cumsum(self.counts) - self.counts
        rows = np.repeat(first[chosen] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        device = self.columns.device
        index, on_device = torch.from_numpy(rows).to(device), order.to(device)
        forbidden = self.inputs.forbidden
        return replace(
            self,
            inputs=Inputs(
                self._columns_of(self.inputs.vector, on_device),
                tuple(self._columns_of(image, on_device) for image in self.inputs.images),
                None if forbidden is None else forbidden.index_select(0, index),
            ),
            action={path: values.index_select(0, index) for path, values in self.action.items()},
            columns=self.columns.index_select(1, index),
            starts=self.starts[:, chosen],
            state={path: one.index_select(0, on_device) for path, one in self.state.items()},
            step=self.step[rows],
            counts=counts,
        )

    def cut(self, sizes: Sequence[tuple[int, int]]) -> Iterator[Rows]:
        """Yield minibatches of the B columns in order, [n] steps each.

        sizes: of each, columns of this rank, which is the only one (`rank_group.MinibatchSplit`).
        """
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        first = 0
        for own, _ in sizes:
            end = first + own
            rows = slice(int(ends[first]), int(ends[end]))
            action = {path: values[rows] for path, values in self.action.items()}
            yield Rows(self._inputs(first, end, rows), action, self.columns[:, rows])
            first = end

    def _inputs(self, first: int, end: int, rows: slice) -> Inputs:
        """Return what gives the outputs of those columns' steps."""
        device = self.columns.device
        place = _place(self.step[rows], self.counts[first:end])
        state = {path: one[first:end] for path, one in self.state.items()}
        forbidden = self.inputs.forbidden
        return Inputs(
            self._by_time(self.inputs.vector)[:, first:end].flatten(0, 1),
            tuple(self._by_time(image)[:, first:end].flatten(0, 1) for image in self.inputs.images),
            None if forbidden is None else forbidden[rows],
            unroll(self.starts[:, first:end], state, burn_in=self.burn_in),
            torch.from_numpy(place).to(device, non_blocking=True),
        )

    def _by_time(self, flat: Tensor) -> Tensor:
        """[T·B, ...] as [T, B, ...]."""
        result: Tensor = flat.unflatten(0, self.starts.shape)
        return result

    def _columns_of(self, flat: Tensor, order: Tensor) -> Tensor:
        return self._by_time(flat).index_select(1, order).flatten(0, 1)


def _place(step: Index, counts: Index) -> Index:
    """Rows of steps [n] among all, step by step: of as many columns as have `counts`."""
    place: Index = step * len(counts) + np.repeat(np.arange(len(counts)), counts)
    return place


def in_columns(kept: Tensor) -> tuple[Tensor, Index, Index]:
    """Return where kept [T, B] is True, column by column.

    The tuple holds flat index int64 [n], row of each [n], count of each column.
    """
    column, step = kept.t().cpu().numpy().nonzero()
    index = torch.from_numpy(step * kept.shape[1] + column).to(kept.device)
    return index, step, np.bincount(column, minlength=kept.shape[1])
