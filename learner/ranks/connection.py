"""Messages from rank 0 to all others over gloo: words as JSON, with bytes where there is more.

A connection has a process group of its own, so that it may be used by a thread of its own. Listeners wait
as long as rank 0 lives; when a rank's process ends its connections close, and each call on them raises Fatal.
"""

import json
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learner.ranks.collectives import lost

PATIENCE: Final = timedelta(days=365)
"""A learner may be paused, or wait for its lease, for any length of time."""


class RankConnection:
    """Sends messages: `say` on rank 0 and `hear` on every other, in turn."""

    def __init__(self) -> None:
        """Make the connection; all ranks make theirs in the same order."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    def say(self, words: dict[str, Any], data: bytes = b"") -> None:
        """Send to all other ranks; returns before they have received."""
        text = json.dumps(words).encode()
        self._broadcast(torch.tensor([len(text), len(data)]))
        self._broadcast(torch.frombuffer(bytearray(text + data), dtype=torch.uint8))

    def hear(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message of rank 0."""
        sizes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        both = bytes(self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8)).numpy())
        return dict(json.loads(both[: sizes[0]])), both[sizes[0] :]

    def add_up(self, numbers: Tensor) -> Tensor:
        """Add numbers up over all ranks, in place: this is how ranks answer.

        Raises Fatal when one is gone.
        """
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
