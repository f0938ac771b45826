"""Steps of a batch as the losses read them: flat, without steps that are not experience.

By section: the steps, a batch as its policy sees it, and the division of both among several ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from penstock.learner.algorithms.losses import Unrolls, carries, next_values
from penstock.learner.batch import Batch, send
from penstock.policy.actor_critic import SeenTrajectory
from penstock.policy.networks import Inputs, Measured, Moments, combine
from penstock.policy.policy import Policy
from penstock.policy.recurrent import Trajectory, unroll
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal


class _Column:
    """One of `Steps.columns`, [n]."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, steps: "Steps", _: type) -> Tensor:
        return steps.columns[self._number]


@dataclass(frozen=True, slots=True)
class Steps:
    """n valid steps as losses read them. columns: [6, n], by the names of the properties.

    anchor: denominator of the ratio, as log-probability. weighted_advantage: advantage times behaviour
    weight. target: of the critic. old_value: V at the start of the batch. behaviour, proximal: log μ(a|s)
    and log π_prox(a|s).
    """

    columns: Tensor
    anchor = _Column(0)
    weighted_advantage = _Column(1)
    target = _Column(2)
    old_value = _Column(3)
    behaviour = _Column(4)
    proximal = _Column(5)

    @property
    def steps(self) -> int:
        return self.columns.shape[1]


@dataclass(frozen=True, slots=True)
class Rows(Steps):
    """Steps without order, or those of one minibatch.

    inputs: of the network, for [n] outputs.   action: by path, [n, *shape].
    whole: rows of all ranks in the minibatch, of which these are one rank's share; None: these.
    """

    inputs: Inputs
    action: dict[str, Tensor]
    whole: int | None = None

    @property
    def total(self) -> int:
        return self.steps if self.whole is None else self.whole

    def __len__(self) -> int:
        return self.steps

    def alone(self) -> Inputs:
        """Return the inputs of the steps, [n]."""
        return self.inputs

    def select(self, index: Tensor) -> "Rows":
        """Return the rows at an int64 index [m] on the CPU, copied."""
        index = send(index, self.columns.device)
        action = {path: values.index_select(0, index) for path, values in self.action.items()}
        return Rows(self.columns.index_select(1, index), self.inputs.select(index), action)

    def cut(self, sizes: Sequence[tuple[int, int]]) -> Iterator["Rows"]:
        """Yield minibatches of the rows in order, as views. sizes: as of `RankRows.split`."""
        start = 0
        for own, total in sizes:
            end = start + own
            action = {path: values[start:end] for path, values in self.action.items()}
            yield Rows(self.columns[:, start:end], self.inputs.narrow(start, own), action, total)
            start = end


Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences(Steps):
    """B columns of T steps, n of them with loss, ordered by column and then by time.

    inputs: [T·B, ...], step by step; only `forbidden` is [n, P].
    action: by path, [n, *shape].   columns: [6, n].
    starts: bool [T, B], where a sequence begins.   state: by path, [B, H], before row 0.
    step: int64 [n], row t of each.   counts: int64 [B], steps of each column.   burn_in: rows without loss.
    """

    inputs: Inputs
    action: dict[str, Tensor]
    starts: NDArray[np.bool_]
    state: Mapping[str, Tensor]
    step: Index
    counts: Index
    burn_in: int

    def __len__(self) -> int:
        """Return the number of columns, which an epoch permutes."""
        return len(self.counts)

    def alone(self) -> Inputs:
        """Return the inputs of the steps with loss, [n], without their order."""
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
        """Yield minibatches of the B columns in order, [n] steps each, of the only rank."""
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        first = 0
        for own, _ in sizes:
            end = first + own
            rows = slice(int(ends[first]), int(ends[end]))
            action = {path: values[rows] for path, values in self.action.items()}
            yield Rows(self.columns[:, rows], self._inputs(first, end, rows), action)
            first = end

    def _inputs(self, first: int, end: int, rows: slice) -> Inputs:
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
        """View [T·B, ...] as [T, B, ...]."""
        return flat.view(*self.starts.shape, *flat.shape[1:])

    def _columns_of(self, flat: Tensor, order: Tensor) -> Tensor:
        return self._by_time(flat).index_select(1, order).flatten(0, 1)


def _place(step: Index, counts: Index) -> Index:
    """Return the index of steps [n] among all rows [T·B]."""
    place: Index = step * len(counts) + np.repeat(np.arange(len(counts)), counts)
    return place


# ---- A batch as its policy sees it.


def see(policy: Policy, batch: Batch) -> SeenTrajectory:
    """Return the inputs of every observation of a batch, with the policy's memory before each."""
    if batch.begins is None:
        lasts = policy.read(batch.final_observation) if len(batch.final_slot) else None
        return SeenTrajectory(batch.observation, policy.read(batch.observation), lasts)
    return policy.look(trajectory_of(batch))


def trajectory_of(batch: Batch) -> Trajectory:
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
    """Return V of every observation, [T+1, B], and of the final ones, [K]. value: of `look.inputs`."""
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
    """Return all columns of a recurrent policy's batch, and the index of its steps with loss, int64 [n].

    trained: bool [T, B]; those of them after the burn-in carry loss. action: by path, [T·B, *shape].
    columns: given that index, returns those of `Steps`, [6, n].
    """
    assert look.starts is not None
    assert look.inputs.time is not None
    kept = trained.clone()
    kept[: policy.memory.burn_in] = False
    column, step = kept.t().cpu().numpy().nonzero()
    index = torch.from_numpy(step * kept.shape[1] + column).to(kept.device)
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
        counts=np.bincount(column, minlength=kept.shape[1]),
        burn_in=policy.memory.burn_in,
    )
    return sequences, index


def unrolls_of(batch: Batch, rewards: Tensor, values: Tensor, finals: Tensor) -> Unrolls:
    """Return the input of the estimators. rewards: [T, B]. values: [T+1, B]. finals: [K]."""
    following = next_values(values, batch.terminated, batch.final_slot, batch.final_step, finals)
    carried = carries(batch.terminated, batch.truncated, batch.valid)
    return Unrolls(rewards, values[:-1], following, carried, batch.valid)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics that an update adds to a policy's. observed: of observations. activations: of layers."""

    observed: Moments | None
    activations: Measured | None

    def checks(self) -> list[Tensor]:
        """Return scalars, float64, that are finite exactly when all statistics are."""
        return [one.checksum().double() for one in (self.observed, self.activations) if one is not None]

    def merge(self, policy: Policy) -> None:
        if self.activations is not None:
            self.activations.merge()
        if self.observed is not None and policy.normaliser is not None:
            policy.normaliser.merge(self.observed)


def observed_by(policy: Policy, look: SeenTrajectory, batch: Batch, group: "RankGroup") -> Moments | None:
    """Return the moments of all ranks' observations of valid steps; None without a normaliser."""
    if policy.normaliser is None:
        return None
    reals = policy.reader.raw_reals(look.observation, torch.float64)
    return group.moments(policy.normaliser.observe(reals[: batch.valid.numel()][batch.valid.flatten()]))


# ---- Several ranks that compute one update together, data parallel.
#
# Every rank holds some columns of the batch and the same weights. Whatever is defined over the whole batch or
# minibatch is summed over all ranks here, so that several ranks make the update that one would make. gloo
# connects CPUs, NCCL GPUs. With one rank every method returns what it was given.


class RankGroup:
    """The ranks of a learner, which all call the same methods in the same order.

    Args:
        group: the processes; None: this process is the only rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor of any shape up over all ranks, in place; equal bits on every rank."""
        if self._group is None:
            return tensor
        with metrics.RANK_EXCHANGE_SECONDS.time():
            return add_up(tensor, self._group)

    def rows_of(self, steps: Tensor) -> "RankRows":
        """Return the rows of a batch that are chosen by bool [T, B] of this rank's columns."""
        if self._group is None:
            return RankRows(self, steps, int(steps.sum()))
        whole, first = self._side_by_side(steps)
        # Row numbers of a single rank: chosen steps, oldest first, then by column.
        numbers = (whole.flatten().cumsum(0) - 1).view_as(whole)
        own = steps.cpu()
        return RankRows(self, steps, int(whole.sum()), numbers[: len(own), first : first + own.shape[1]][own])

    def columns(self, values: Tensor) -> Tensor:
        """Return the columns [T, B] of all ranks side by side, on the CPU; missing rows are 0."""
        return values.cpu() if self._group is None else self._side_by_side(values)[0]

    def listed(self, numbers: Sequence[int]) -> tuple[list[int], int]:
        """Return the numbers of all ranks, rank by rank, and the index of this one's first."""
        if self._group is None:
            return list(numbers), 0
        whole, first = self._side_by_side(torch.tensor([numbers], dtype=torch.int64))
        return whole[0].tolist(), first

    def moments(self, own: Moments) -> Moments:
        """Return the moments of the rows of all ranks, combined in one order: equal bits on every rank."""
        if self._group is None:
            return own
        row = torch.cat([own.count.reshape(1), own.mean, own.spread])
        every = row.new_zeros((self.size, len(row)))
        every[self.rank] = row
        width = len(own.mean)
        parts = [Moments(one[0], one[1 : 1 + width], one[1 + width :]) for one in self.sum_(every)]
        whole = parts[0]
        for part in parts[1:]:
            whole = combine(whole, part)
        return whole

    def _side_by_side(self, values: Tensor) -> tuple[Tensor, int]:
        """Return the columns of all ranks on the CPU, and the index of the first of this one's."""
        shapes = torch.zeros((self.size, 2), dtype=torch.int64)
        shapes[self.rank] = torch.tensor(values.shape)
        self.sum_(shapes)
        first = int(shapes[: self.rank, 1].sum())
        kind = torch.uint8 if values.dtype is torch.bool else values.dtype
        whole = torch.zeros((int(shapes[:, 0].max()), int(shapes[:, 1].sum())), dtype=kind)
        whole[: len(values), first : first + values.shape[1]] = values.cpu()
        return self.sum_(whole).to(values.dtype), first


@dataclass(frozen=True, slots=True)
class RankRows:
    """The rows (chosen steps) of one batch that are this rank's: n of N.

    steps: the chosen steps of this rank's columns, bool [T, B].   total: N.
    numbers: of its rows, rising int64 [n] on the CPU; None: all.
    """

    group: RankGroup
    steps: Tensor
    total: int
    numbers: Tensor | None = None

    def split(self, order: Tensor, pieces: int) -> tuple[Tensor, list[tuple[int, int]]]:
        """Cut an epoch's `order`, a permutation int64 [N], into nearly equal minibatches.

        Returns this rank's rows, int64 [n] on the CPU, minibatch by minibatch, and for each minibatch the
        number of rows of this rank and of all ranks. There are fewer minibatches when N is smaller.
        """
        cuts = torch.tensor(edges(self.total, pieces))
        sizes = cuts.diff().tolist()
        if self.numbers is None:
            return order, list(zip(sizes, sizes, strict=True))
        local = torch.full((self.total,), -1)
        local[self.numbers] = torch.arange(len(self.numbers))
        dealt = local[order]
        is_own = dealt >= 0
        before = torch.cat([is_own.new_zeros(1, dtype=torch.int64), is_own.cumsum(0)])
        return dealt[is_own], list(zip(before[cuts].diff().tolist(), sizes, strict=True))

    def gather(self, rows: Tensor) -> Tensor:
        """Return this rank's rows [..., n], in any order, among those of all ranks, [..., N]."""
        if self.numbers is None:
            return rows
        whole = rows.new_zeros((*rows.shape[:-1], self.total))
        return self.group.sum_(whole.index_copy_(-1, send(self.numbers, rows.device), rows))

    def own(self, rows: Tensor) -> Tensor:
        """Return this rank's rows [..., n] of those that `gather` returned, [..., N]."""
        return rows if self.numbers is None else rows.index_select(-1, send(self.numbers, rows.device))


def edges(rows: int, pieces: int) -> list[int]:
    """Return the edges of nearly equal parts; there are fewer parts when there are fewer rows."""
    pieces = min(pieces, rows)
    return [rows * i // pieces for i in range(pieces + 1)]


def add_up(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add up over a group in place; raises Fatal when a process of it is gone."""
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise lost(error) from error
    return tensor


def lost(error: RuntimeError) -> Fatal:
    return Fatal(f"another rank of this learner is gone, so this one ends: {str(error).splitlines()[0]}")
