"""`RankGroup` of several processes, by torch.distributed: gloo between CPUs, NCCL between GPUs.

Rows are put where a single rank has them and added up over the ranks, all others being 0: exact, and one
kind of collective for everything. When a rank ends, the others end here with Fatal: at once where a gloo
connection closes, otherwise within the group's timeout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learner.algorithms.shared.rank_group import MinibatchSplit, RankRows, edges
from penstock.learner.batch import send
from penstock.policy.normaliser import Moments, combine
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal


class TorchGroup:
    """Implements `RankGroup` for the ranks of a process group, in the thread of the loop."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def rows_of(self, steps: Tensor) -> RankRows:
        """Exchange which steps are chosen on all ranks, and return this rank's rows of them."""
        whole, first = self._side_by_side(steps)
        # Row numbers of a single rank: chosen steps, oldest first, then by column.
        numbers = (whole.flatten().cumsum(0) - 1).view_as(whole)
        mine = steps.cpu()
        own = numbers[: len(mine), first : first + mine.shape[1]][mine]
        return _Part(self, steps, int(whole.sum()), own, send(own, steps.device))

    def columns(self, values: Tensor) -> Tensor:
        """Return the columns of all ranks side by side, see `RankGroup`."""
        return self._side_by_side(values)[0]

    def listed(self, numbers: Sequence[int]) -> tuple[list[int], int]:
        """Return the numbers of all ranks, see `RankGroup`."""
        whole, first = self._side_by_side(torch.tensor([numbers], dtype=torch.int64))
        return whole[0].tolist(), first

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks in place, see `RankGroup`; raises Fatal when a rank is gone."""
        with metrics.RANK_EXCHANGE_SECONDS.time():
            try:
                dist.all_reduce(tensor, group=self._group)
            except RuntimeError as error:
                raise lost(error) from error
        return tensor

    def moments(self, own: Moments) -> Moments:
        """Combine moments in the order of the ranks, so that all get equal bits."""
        row = torch.cat([own.count.reshape(1), own.mean, own.spread])
        every = row.new_zeros((self.size, len(row)))
        every[self.rank] = row
        parts = [_moments(part) for part in self.sum_(every)]
        whole = parts[0]
        for part in parts[1:]:
            whole = combine(whole, part)
        return whole

    def placed(self, rows: Tensor, places: Tensor, total: int) -> Tensor:
        """Return rows [..., n] at int64 places [n] of [..., total], with the other ranks' rows at theirs."""
        whole = rows.new_zeros((*rows.shape[:-1], total))
        whole.index_copy_(-1, places, rows)
        return self.sum_(whole)

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
class _Part:
    """This rank's rows. numbers: int64 [n] on the CPU, rising; places: the same on the device."""

    group: TorchGroup
    steps: Tensor
    total: int
    numbers: Tensor
    places: Tensor

    def split(self, order: Tensor, minibatches: int) -> MinibatchSplit:
        local = torch.full((self.total,), -1)
        local[self.numbers] = torch.arange(len(self.numbers))
        dealt = local[order]
        is_mine = dealt >= 0
        before = torch.cat([is_mine.new_zeros(1, dtype=torch.int64), is_mine.cumsum(0)])
        cuts = torch.tensor(edges(self.total, minibatches))
        # Only the edges leave the tensors: a list of all rows takes longer than all else here.
        sizes = list(zip(before[cuts].diff().tolist(), cuts.diff().tolist(), strict=True))
        index = dealt[is_mine]
        return _Dealt(self, index, sizes, send(self.numbers[index], self.places.device))

    def gather(self, rows: Tensor) -> Tensor:
        return self.group.placed(rows, self.places, self.total)

    def own(self, rows: Tensor) -> Tensor:
        return rows.index_select(-1, self.places)


@dataclass(frozen=True, slots=True)
class _Dealt:
    part: _Part
    index: Tensor
    sizes: list[tuple[int, int]]
    places: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        return self.part.group.placed(rows, self.places, self.part.total)


def lost(error: RuntimeError) -> Fatal:
    """Return the error that ends a rank whose group has fallen apart."""
    return Fatal(f"another rank of this learner is gone, so this one ends: {str(error).splitlines()[0]}")


def _moments(row: Tensor) -> Moments:
    width = (len(row) - 1) // 2
    return Moments(row[0], row[1 : 1 + width], row[1 + width :])
