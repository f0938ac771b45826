"""The observations that replay holds, each once: transitions name them by number.

Frames of an entry of the log lie behind those of the entry before it. They are numbered for ever, and the
ring holds those from the oldest entry's to the newest one's. Where more come than it has room for it grows:
how many frames a transition takes depends on how fragments were cut.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

_GROWTH: Final = 1.25


class FrameRing:
    """Frames by path, [room, *shape] each, on one device; room: how many it holds before it grows."""

    def __init__(self, room: int, device: torch.device) -> None:
        self._room, self._device = room, device
        self._frames: dict[str, Tensor] = {}
        self.first = self.end = 0
        """Numbers of the oldest frame and of the one behind the newest."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its room, of which the system provides those that were written."""
        return sum(frames.nbytes for frames in self._frames.values())

    def append(self, new: Mapping[str, Tensor]) -> int:
        """Append frames by path, [F, *shape] each; returns the number of the first."""
        start = self.end
        count = len(next(iter(new.values())))
        if self.end + count - self.first > self._room:
            self._grow(self.end + count - self.first)
        for path, frames in new.items():
            if path not in self._frames:
                self._frames[path] = self._empty(frames, self._room)
            self._frames[path][self._places(start, start + count)] = frames.to(self._device)
        self.end += count
        return start

    def keep(self, first: int, end: int) -> None:
        """Forget all frames but those from `first` to the one before `end`."""
        self.first, self.end = first, end

    def at(self, path: str, number: Tensor) -> Tensor:
        """Return the frames of a path, [..., *shape]. number: int64 [...]."""
        return self._frames[path][number % self._room]

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of which there are frames."""
        return tuple(self._frames)

    def _grow(self, least: int) -> None:
        room = max(least, int(self._room * _GROWTH))
        held = torch.arange(self.first, self.end, device=self._device)
        grown = {}
        for path, frames in self._frames.items():
            grown[path] = self._empty(frames, room)
            grown[path][held % room] = frames[held % self._room]
        self._frames, self._room = grown, room

    def _places(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self._device) % self._room

    def _empty(self, like: Tensor, room: int) -> Tensor:
        """Return room that is not written yet; the system provides pages as they are."""
        return torch.empty((room, *like.shape[1:]), dtype=like.dtype, device=self._device)
