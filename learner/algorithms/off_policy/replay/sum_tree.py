"""A sum tree over priorities.

Draw an index in proportion to its priority, change priorities, both in O(log n).

Schaul et al. 2016, appendix B.2.1. A complete binary tree in one tensor: node 1 is the root, node i has the
children 2i and 2i+1, the leaves are the last half. Every inner node is computed as the sum of its children
and never adjusted, so that rounding does not accumulate. All operations are of whole batches, on the tree's
device.
"""

import torch
from torch import Tensor


class SumTree:
    """Holds `capacity` leaves of priority ≥ 0, float64; 0 at first."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._depth = max(capacity - 1, 1).bit_length()
        self._first = 1 << self._depth
        self._nodes = torch.zeros(2 * self._first, dtype=torch.float64, device=device)

    @property
    def total(self) -> Tensor:
        """Return the sum of all priorities, a scalar on the device."""
        return self._nodes[1]

    def get(self, index: Tensor) -> Tensor:
        """Return the priorities [n] of leaves int64 [n]."""
        return self._nodes[self._first + index]

    def set(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities [n] of leaves int64 [n]; an index that occurs twice must have one priority."""
        node = self._first + index
        self._nodes[node] = priority.to(self._nodes)
        for _ in range(self._depth):
            node = node >> 1
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]

    def find(self, mass: Tensor) -> Tensor:
        """Return the leaf int64 [n] in which each `mass`, float64 [n] of 0..total, falls.

        All priorities lie end to end. It never returns a leaf of priority 0 while any is above 0, even when
        `mass` is rounded.
        """
        rest = mass.clone()
        node = torch.ones_like(mass, dtype=torch.int64)
        for _ in range(self._depth):
            left = self._nodes[2 * node]
            goes_right = (rest >= left) & (self._nodes[2 * node + 1] > 0)
            rest = torch.where(goes_right, rest - left, rest)
            node = 2 * node + goes_right
        return node - self._first
