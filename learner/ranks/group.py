"""The ranks that compute one update together: data parallel, by sums over all of them.

Every rank holds some columns of the batch and the same weights. Whatever is defined over the whole batch
goes through here, so that several ranks make the update that one would make. gloo connects CPUs, NCCL GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learner.batch import send
from penstock.policy.networks import Moments, combine
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal


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
        """Choose rows of a batch: bool [T, B] of this rank's columns, behind those of the rank before."""
        if self._group is None:
            return RankRows(self, steps, int(steps.sum()))
        whole, first = self._side_by_side(steps)
        # Row numbers of a single rank: chosen steps, oldest first, then by column.
        numbers = (whole.flatten().cumsum(0) - 1).view_as(whole)
        own = steps.cpu()
        return RankRows(self, steps, int(whole.sum()), numbers[: len(own), first : first + own.shape[1]][own])

    def columns(self, values: Tensor) -> Tensor:
        """Return the columns [T, B] of all ranks side by side, rows that a rank lacks 0; on the CPU."""
        return values.cpu() if self._group is None else self._side_by_side(values)[0]

    def listed(self, numbers: Sequence[int]) -> tuple[list[int], int]:
        """Return the numbers of all ranks, one rank's behind another's, and where this one's begin."""
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
    """Which rows (steps that were chosen) of one batch are this rank's: n of N.

    steps: those that were chosen of this rank's columns, bool [T, B].   total: N.
    numbers: of its rows, rising int64 [n] on the CPU; None: all.
    """

    group: RankGroup
    steps: Tensor
    total: int
    numbers: Tensor | None = None

    def split(self, order: Tensor, pieces: int) -> tuple[Tensor, list[tuple[int, int]]]:
        """Cut an epoch's `order`, a permutation int64 [N], into nearly equal minibatches.

        Returns this rank's rows, int64 [n] on the CPU, minibatch by minibatch, and of each minibatch the rows
        of this rank and those of all ranks. There are fewer minibatches when N is smaller.
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
    """Return where nearly equal parts begin and end; fewer parts when there are fewer rows."""
    pieces = min(pieces, rows)
    return [rows * i // pieces for i in range(pieces + 1)]


def add_up(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add up over a group in place; raises Fatal when one of it is gone."""
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise lost(error) from error
    return tensor


def lost(error: RuntimeError) -> Fatal:
    return Fatal(f"another rank of this learner is gone, so this one ends: {str(error).splitlines()[0]}")
