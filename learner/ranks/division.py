"""Division of a batch's fragments among the ranks."""

from collections.abc import Sequence
from itertools import pairwise


def divide(charges: Sequence[int], ranks: int) -> list[slice]:
    """Return neighbouring fragments for each rank, in order, of nearly equal charge; a rank may get none.

    A fragment goes to the rank in whose part of the whole its middle lies. charges: environment steps of
    each.
    """
    total, before = sum(charges), 0
    of = []
    for charge in charges:
        of.append(min(ranks - 1, (2 * before + charge) * ranks // max(1, 2 * total)))
        before += charge
    starts = [sum(rank < at for rank in of) for at in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]
