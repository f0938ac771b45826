"""What every action distribution is: the head of one leaf of the action space.

The learner's half (`log_prob`, `entropy`) is torch and differentiable over any leading axes; the actor's half
(`draw`, `mode`) is numpy over [N, size]. Both take `parameters`, the `size` outputs of the network that
belong to the leaf.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.wire.tensor import Array

Reals = NDArray[np.floating]
SMALLEST_NORMAL = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class Place:
    """Which environments a policy acts in: from number `first` on, of all `of` that the run's actors have."""

    first: int = 0
    of: int = 1


class ActionHead(nn.Module):
    """Distribution of one leaf of the action space.

    path: name of the action tensor.   size: outputs of the network that it needs.
    """

    has_slope = False
    """Whether `slope` is there, and of this head's own `log_prob` and `entropy`."""

    def __init__(self, path: str, size: int, dtype: str) -> None:
        super().__init__()
        self.path = path
        self.size = size
        self.action_dtype = np.dtype(dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Parameters [..., size], action [..., *shape] as drawn → [...]."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Parameters [..., size] → [...], in nats."""
        raise NotImplementedError

    def slope(self, parameters: Tensor, action: Tensor, by_log_prob: Tensor, by_entropy: float) -> Tensor:
        """∂L/∂parameters [n, size] in closed form, where an L of n rows has ∂L/∂log π = `by_log_prob` [n].

        by_entropy: ∂L/∂H of each row. No gradients are followed. Only of a head that has no parameters of its
        own.
        """
        raise NotImplementedError

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Parameters [N, size] → an action [N, *shape] and its log-probability [N]."""
        raise NotImplementedError

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """The most likely action (before squashing) and its log-probability, as `draw`."""
        raise NotImplementedError

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Log-probability [N] with which `draw` draws an action [N, *shape] from parameters [N, size]."""
        with torch.inference_mode():
            # Copied: the action may be a read-only view of a message.
            answer: Reals = self.log_prob(
                torch.from_numpy(parameters.copy()), torch.from_numpy(action.copy())
            ).numpy()
        return answer

    def explore(self, scalars: Mapping[str, float], place: Place) -> None:
        """Draw as the numbers say that came with the weights; most distributions need none."""

    def to_environment(self, action: Array) -> Array:
        """An action as drawn, [N, *shape], as the environment takes it."""
        return action

    def from_environment(self, action: Array) -> Array:
        """The action as drawn of one that an environment takes, both [N, *shape].

        Raises ValueError for one that this distribution cannot draw.
        """
        return action

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """Parameters [N, size] that give what is not `allowed` [N, size] no probability.

        Raises ValueError where nothing can be masked.
        """
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether a mask [size] holds each choice of an action as drawn, [*shape]."""
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """What `draw` draws from, by name: arrays [N, size]."""
        raise NotImplementedError
