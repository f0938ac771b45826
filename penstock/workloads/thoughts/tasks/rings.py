"""Hops on a ring: where does one arrive, k steps from s?

    c>a  b>d  …  a>b   s   k3   =   f(f(f(s)))

A ring f of n symbols is drawn anew for every question and shown as its n edges in random order. A thought of
the k − 1 symbols on the way makes k single hops of it, and that is what a thought is for: one pass of a small
transformer follows a few hops and no more. Who can follow h hops forward and h' backward in one pass has, for
more, only a uniform draw from the other symbols, and so no better accuracy than 1 / (n − 1 − h − h').
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from penstock.workloads.thoughts.tasks.example import Continuation, Example


class Rings:
    """A `Task`. symbols: n. hops: k at most."""

    def __init__(self, symbols: int = 11, hops: int = 6) -> None:
        if not 4 <= symbols <= 26:
            raise ValueError(f"a ring has 4 to 26 symbols, not {symbols}")
        if not 2 <= hops <= symbols - 2:
            raise ValueError(f"on {symbols} symbols there are 2 to {symbols - 2} hops, not {hops}")
        self._hops = hops
        self.symbols = tuple("abcdefghijklmnopqrstuvwxyz"[:symbols])
        self.levels = tuple(range(1, hops + 1))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Return symbols, edges and numbers of hops."""
        edges = (f"{one}>{other}" for one in self.symbols for other in self.symbols if one != other)
        return (*self.symbols, *edges, *(f"k{hops}" for hops in self.levels))

    @property
    def most_gain(self) -> float:
        """Return ln(n − 1): without a thought nothing is known but that s does not lead to itself."""
        return math.log(len(self.symbols) - 1)

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Return a ring, a start and `level` hops."""
        order = [self.symbols[one] for one in random.permutation(len(self.symbols))]
        following = dict(zip(order, order[1:] + order[:1], strict=True))
        edges = [f"{one}>{other}" for one, other in following.items()]
        shown = [edges[one] for one in random.permutation(len(edges))]
        way = _walk(following, order[0], level)
        first = order.index(self.symbols[0])
        return Example(
            question=(*shown, order[0], f"k{level}"),
            answer=way[-1:],
            steps=way[:-1],
            level=level,
            identity="".join(order[first:] + order[:first]),
        )

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """Return the hops from the last symbol of a thought on; None where it is none or too long."""
        left = int(question[-1].removeprefix("k")) - len(thought)
        if left < 1 or not set(thought) <= set(self.symbols):
            return None
        following = dict(edge.split(">") for edge in question[: len(self.symbols)])
        start = thought[-1] if thought else question[len(self.symbols)]
        way = _walk(following, start, left)
        return Continuation(way[:-1], way[-1:])


def accuracy_without_thoughts(symbols: int, hops: int, *, forward: int, backward: int = 0) -> float:
    """Return the best accuracy of one who follows so many hops in one pass.

    symbols: n of the ring. hops: k that are asked. forward, backward: hops that can be followed.
    """
    if hops <= forward or symbols - hops <= backward:
        return 1.0
    return 1.0 / (symbols - 1 - forward - backward)


def _walk(following: dict[str, str], start: str, hops: int) -> tuple[str, ...]:
    way = [start]
    for _ in range(hops):
        way.append(following[way[-1]])
    return tuple(way[1:])
