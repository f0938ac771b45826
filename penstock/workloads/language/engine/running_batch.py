"""Rows of one version that are being continued, one token of all at a time; rows join and leave in between.

    join    prompts are read in a pass of their own, and their keys and values put beside those of the others
    forward one pass over the newest token of each row
    keep    without the rows that are done, and without the places that no other row uses

Rows of different length stand right-aligned, and a mask hides the places before each.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from penstock.workloads.language.generation.cached_generation import left_padded
from penstock.workloads.language.generation.growing_cache import GrowingLayer


class RunningBatch:
    """M rows. Used by one thread; every call is given the network under the batch's version."""

    def __init__(self, pad_id: int, device: torch.device) -> None:
        self._pad, self._device = pad_id, device
        self._cache: Any = None
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=device)
        self._positions = torch.zeros((0, 1), dtype=torch.long, device=device)

    def __len__(self) -> int:
        return len(self._mask)

    @property
    def places(self) -> int:
        """Of keys and values in each row."""
        return self._mask.shape[1]

    def join(self, network: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts, none of them empty, as the last rows. Logits of their next tokens, [k, V]."""
        ids, mask = left_padded(prompts, self._pad, self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache: Any = Cache(layer_class_to_replicate=GrowingLayer)
        logits = _logits(network, ids, mask, positions, cache)
        if len(self):
            for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
                mine.join(theirs)
        else:
            self._cache = cache
            self._mask = self._mask.new_zeros((0, mask.shape[1]))
        longest = max(self.places, mask.shape[1])
        self._mask = torch.cat([_right_aligned(one, longest) for one in (self._mask, mask)])
        self._positions = torch.cat([self._positions, positions[:, -1:]])
        return logits

    def forward(self, network: Any, newest: Tensor) -> Tensor:
        """Read the newest token of each row, int64 [M]. Logits of the next, [M, V]."""
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        self._positions = self._positions + 1
        return _logits(network, newest[:, None], self._mask, self._positions, self._cache)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, int64 [K], in this order."""
        self._mask, self._positions = self._mask[rows], self._positions[rows]
        if not len(rows):
            self._cache, self._mask = None, self._mask[:, :0]
            return
        self._cache.batch_select_indices(rows)
        unused = int(self._mask.any(0).long().argmax())
        if unused:
            self._mask = self._mask[:, unused:]
            for layer in self._cache.layers:
                layer.forget(unused)


def _logits(network: Any, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
    made = network(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = made.logits[:, -1].float()
    return logits


def _right_aligned(mask: Tensor, length: int) -> Tensor:
    return functional.pad(mask, (length - mask.shape[1], 0))
