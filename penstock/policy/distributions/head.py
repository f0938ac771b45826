"""The contract of an action distribution: the head of one leaf of the action space.

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
    """The environments in which a policy acts.

    From number `first` on, of all `of` that the run's actors have.
    """

    first: int = 0
    of: int = 1


class ActionHead(nn.Module):
    """The distribution of one leaf of the action space.

    path: name of the action tensor.
    size: number of outputs of the network that it needs.
    """

    has_slope = False
    """Whether `slope` is implemented, and is that of this head's own `log_prob` and `entropy`."""

    def __init__(self, path: str, size: int, dtype: str) -> None:
        super().__init__()
        self.path = path
        self.size = size
        self.action_dtype = np.dtype(dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return log-probabilities [...] of actions [..., *shape] as drawn, under parameters [..., size]."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return entropies [...] in nats of parameters [..., size]."""
        raise NotImplementedError

    def slope(self, parameters: Tensor, action: Tensor, by_log_prob: Tensor, by_entropy: float) -> Tensor:
        """Return ∂L/∂parameters [n, size] in closed form, without gradients.

        Only a head without parameters of its own has it.

        Args:
            parameters: outputs of the network, [n, size].
            action: actions as drawn, [n, *shape].
            by_log_prob: ∂L/∂log π of each row, [n].
            by_entropy: ∂L/∂H of each row.
        """
        raise NotImplementedError

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw from parameters [N, size]: an action [N, *shape] and its log-probability [N]."""
        raise NotImplementedError

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the most likely action (before squashing) and its log-probability, as `draw` does."""
        raise NotImplementedError

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-probability [N] with which `draw` draws an action [N, *shape].

        parameters: [N, size].
        """
        with torch.inference_mode():
            # Copied: the action may be a read-only view of a message.
            answer: Reals = self.log_prob(
                torch.from_numpy(parameters.copy()), torch.from_numpy(action.copy())
            ).numpy()
        return answer

    def explore(self, scalars: Mapping[str, float], place: Place) -> None:
        """Set how `draw` explores by the scalars that came with the weights.

        Most distributions ignore them.
        """

    def to_environment(self, action: Array) -> Array:
        """Convert an action as drawn, [N, *shape], to the form that the environment takes."""
        return action

    def from_environment(self, action: Array) -> Array:
        """Convert an action in the form of the environment to that of `draw`, both [N, *shape].

        Raises ValueError for one that this distribution cannot draw.
        """
        return action

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """Return parameters [N, size] that give what is not `allowed`, bool [N, size], no probability.

        Raises ValueError for a distribution that cannot be masked, or a row that allows nothing.
        """
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whether a mask [size] holds each choice of an action as drawn, [*shape].

        Raises ValueError for a distribution that cannot be masked.
        """
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return the distribution that `draw` draws from, by name: arrays [N, size]."""
        raise NotImplementedError
