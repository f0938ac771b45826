"""Adapters that do not become what was published: they never arrive, arrive late or arrive broken."""

from typing import Final

import numpy as np
from torch import nn

from penstock.policy import weights

WRONG: Final = ("never", "late", "corrupted")


class Fault:
    """What becomes of weights between their digest and the policy, in the actor that was first to apply any.

    way: applied, or one of `WRONG`. The actor goes on to say that it has the version it was sent.
    """

    def __init__(self) -> None:
        self.way = "applied"
        self._victim: nn.Module | None = None
        self._before = b""

    def __call__(self, module: nn.Module, blob: bytes) -> None:
        """In place of the policy's `load`."""
        self._victim = self._victim or module
        way = self.way if module is self._victim else "applied"
        if way != "never":
            weights.load_into(module, {"late": self._before, "corrupted": _broken(blob)}.get(way, blob))
        if module is self._victim:
            self._before = blob

    @property
    def has_victim(self) -> bool:
        """Whether an actor has applied anything."""
        return self._victim is not None


def _broken(blob: bytes) -> bytes:
    """One of the tensors is zero, as if its pages had not been written."""
    arrays = weights.decode(blob)
    name = next(name for name in sorted(arrays) if "lora_B" in name)
    return weights.encode({**arrays, name: np.zeros_like(arrays[name])})
