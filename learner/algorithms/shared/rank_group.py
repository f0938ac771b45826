"""The ranks that compute one update together.

This is the interface between an algorithm and the other ranks of its learner.

Every rank holds some columns of the batch and the same weights. Whatever is defined over the batch as a
whole goes through here (standardised advantages, minibatches, gradients, KL, moments), so that an update
by several ranks is the one that a single rank would make. `SingleRankGroup` is that single rank: it hands
back what it is given.

    rows_of(steps) → this rank's rows, in the order of a single rank → split(order, k) → an epoch's
    minibatches sum_(gradient of own rows) → the gradient of the whole minibatch, on every rank
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from penstock.policy.normaliser import Moments


class MinibatchSplit(Protocol):
    """One epoch: which rows of the whole batch are in which minibatch, and which of them this rank has."""

    @property
    def index(self) -> Tensor:
        """This rank's own rows, int64 [n] on the CPU, minibatch by minibatch."""
        ...

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return, of each minibatch, rows of this rank and rows of all ranks."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Gather rows [..., n] in the order of `index` into those of all ranks, [..., N], in one order."""
        ...


class RankRows(Protocol):
    """Which rows (steps that were chosen) of one batch are this rank's: n of N."""

    @property
    def steps(self) -> Tensor:
        """Those that were chosen of this rank's columns, bool [T, B]."""
        ...

    @property
    def total(self) -> int:
        """Rows of all ranks (N)."""
        ...

    def split(self, order: Tensor, minibatches: int) -> MinibatchSplit:
        """Cut an epoch's `order`, a permutation int64 [N], into nearly equal parts.

        There are fewer parts when N is smaller.
        """
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Gather own rows [..., n] into those of all ranks, [..., N], in the order of a single rank."""
        ...

    def own(self, rows: Tensor) -> Tensor:
        """Return this rank's own rows [..., n] of rows [..., N] of all ranks: the inverse of `gather`."""
        ...


class RankGroup(Protocol):
    """The ranks of a learner. All of them call the same methods in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """Number of this one, from 0."""
        ...

    def rows_of(self, steps: Tensor) -> RankRows:
        """Choose rows of a batch: bool [T, B] of this rank's columns.

        Ranks follow one another in the batch.
        """
        ...

    def columns(self, values: Tensor) -> Tensor:
        """Return the columns [T, B] of all ranks side by side, rows that a rank lacks 0; on the CPU."""
        ...

    def listed(self, numbers: Sequence[int]) -> tuple[list[int], int]:
        """Return the numbers of all ranks, one rank's behind another's, and where this one's begin."""
        ...

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor of any shape up over all ranks, in place; equal bits on every rank."""
        ...

    def moments(self, own: Moments) -> Moments:
        """Return the moments of the rows of all ranks."""
        ...


def edges(rows: int, pieces: int) -> list[int]:
    """Return where nearly equal parts begin and end; fewer parts when there are fewer rows."""
    pieces = min(pieces, rows)
    return [rows * i // pieces for i in range(pieces + 1)]


def evenly(rows: int, pieces: int) -> list[tuple[int, int]]:
    """`MinibatchSplit.sizes` of nearly equal parts for one rank."""
    return [(end - start, end - start) for start, end in pairwise(edges(rows, pieces))]


@dataclass(frozen=True, slots=True)
class _SingleRankSplit:
    index: Tensor
    sizes: list[tuple[int, int]]

    def gather(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True, slots=True)
class _SingleRankRows:
    steps: Tensor
    total: int

    def split(self, order: Tensor, minibatches: int) -> MinibatchSplit:
        return _SingleRankSplit(order, evenly(len(order), minibatches))

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def own(self, rows: Tensor) -> Tensor:
        return rows


class SingleRankGroup:
    """A learner of one rank."""

    size = 1
    rank = 0

    def rows_of(self, steps: Tensor) -> RankRows:
        """Return all rows of steps bool [T, B]: there is one rank."""
        return _SingleRankRows(steps, int(steps.sum()))

    def columns(self, values: Tensor) -> Tensor:
        """Return the columns [T, B], on the CPU: there is one rank."""
        return values.cpu()

    def listed(self, numbers: Sequence[int]) -> tuple[list[int], int]:
        """Return the values as they are."""
        return list(numbers), 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Return the tensor, of any shape: there is one rank."""
        return tensor

    def moments(self, own: Moments) -> Moments:
        """Return the moments: there is one rank."""
        return own
