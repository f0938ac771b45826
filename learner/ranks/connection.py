"""What rank 0 says to all others: words as JSON, with bytes where there is more, over gloo.

A line has a process group of its own, so that it may be used by a thread of its own. Those who listen wait
as long as rank 0 lives and says nothing; when a rank's process ends its connections close, and whoever
speaks or listens raises Fatal.
"""

import json
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from learner.ranks.collectives import lost

PATIENCE: Final = timedelta(days=365)
"""A learner may be paused, or wait for its lease, for as long as anybody likes."""


class Line:
    """`say` on rank 0 and `hear` on every other, in turn."""

    def __init__(self) -> None:
        """Made by all ranks in the same order."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    def say(self, words: dict[str, Any], data: bytes = b"") -> None:
        """To all other ranks; returns before they have heard."""
        text = json.dumps(words).encode()
        self._broadcast(torch.tensor([len(text), len(data)]))
        self._broadcast(torch.frombuffer(bytearray(text + data), dtype=torch.uint8))

    def hear(self) -> tuple[dict[str, Any], bytes]:
        """What rank 0 says next."""
        sizes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        both = bytes(self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8)).numpy())
        return dict(json.loads(both[: sizes[0]])), both[sizes[0] :]

    def add_up(self, numbers: Tensor) -> Tensor:
        """Over all ranks, in place: how those who were asked answer."""
        try:
            dist.all_reduce(numbers, group=self._group)
        except RuntimeError as error:
            raise lost(error) from error
        return numbers

    def _broadcast(self, tensor: Tensor) -> Tensor:
        try:
            dist.broadcast(tensor, src=0, group=self._group)
        except RuntimeError as error:
            raise lost(error) from error
        return tensor
