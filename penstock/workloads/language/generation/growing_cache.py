"""Keys and values of a layer for rows that come and go."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values, [B, H, L, D] each, in memory that doubles when it is full.

    Transformers copies all of it for each token.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin without places; key_states, value_states: [B, H, L, D], as of `DynamicLayer`."""
        super().lazy_initialization(key_states, value_states)
        self._rooms = [states[:, :, :0] for states in (key_states, value_states)]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new places and return those of all, [B, H, L, D] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        end = held + key_states.shape[2]
        if end > self._rooms[0].shape[2]:
            self._rooms = [_doubled(room, held, end) for room in self._rooms]
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, held:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at int64 indices [b], in this order."""
        held = self.get_seq_length()
        self._rooms = [room[indices] for room in self._rooms]
        self.keys, self.values = (room[:, :, :held] for room in self._rooms)

    def forget(self, count: int) -> None:
        """Drop the first `count` places of every row."""
        self._hold(self.keys[:, :, count:], self.values[:, :, count:])

    def join(self, other: "GrowingLayer") -> None:
        """Take the rows of another; the shorter ones get places before them."""
        longest = max(self.get_seq_length(), other.get_seq_length())
        keys, values = (
            torch.cat([_with_places_before(one, longest) for one in both])
            for both in ((self.keys, other.keys), (self.values, other.values))
        )
        self._hold(keys, values)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self._rooms = [keys, values]
        self.keys, self.values = keys, values


def _doubled(room: Tensor, held: int, needed: int) -> Tensor:
    """Room for twice of what is needed, [B, H, 2 · needed, D], with what is held."""
    larger = room.new_empty((*room.shape[:2], 2 * needed, room.shape[3]))
    larger[:, :, :held] = room[:, :, :held]
    return larger


def _with_places_before(states: Tensor, length: int) -> Tensor:
    return functional.pad(states, (0, 0, length - states.shape[2], 0))
