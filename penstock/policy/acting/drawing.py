"""The actor's half of an action distribution, in numpy: how the actions of one leaf of the space are drawn.

`penstock.policy.distributions` adds the learner's half, in torch. Both take `parameters`, the `size` outputs
of the network that belong to the leaf.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.tensor import Array

Reals = NDArray[np.floating]
SMALLEST_NORMAL = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class ExplorationSlots:
    """The slots, among those of all actors, in which a policy acts: what it explores at depends on them.

    From number `first` on, of all `of` that the run's actors have.
    """

    first: int = 0
    of: int = 1


class Drawing:
    """Draws the actions of one leaf of the action space.

    path: name of the action tensor.
    size: number of outputs of the network that it needs.

    A subclass defines `draw`, `mode`, `chance` and `describe`; here they raise NotImplementedError.
    """

    def __init__(self, path: str, size: int, dtype: str) -> None:
        self.path = path
        self.size = size
        self.action_dtype = np.dtype(dtype)

    @property
    def chooses_by_value(self) -> bool:
        """Return whether outputs are values of actions, and only exploration draws others than the best."""
        return False

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw from parameters [N, size]: an action [N, *shape] and its log-probability [N]."""
        raise NotImplementedError

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the most likely action (before squashing) and its log-probability, as `draw` does.

        parameters: [N, size].
        """
        raise NotImplementedError

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-probability [N] with which `draw` draws an action [N, *shape].

        parameters: [N, size].
        """
        raise NotImplementedError

    def probe_log_prob(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-probability [N] that the learner's half computes of an action [N, *shape].

        It is that of `chance` unless actions are drawn otherwise than the learner sees them. parameters:
        [N, size].
        """
        return self.chance(parameters, action)

    def explore(self, scalars: Mapping[str, float], place: ExplorationSlots) -> None:
        """Set how `draw` explores by the scalars that came with the weights.

        Most distributions ignore them.
        """

    def own_weights(self) -> dict[str, Array]:
        """Return the arrays that belong to the distribution and not to the network, by name; most have none.

        Their shape and dtype are those of the published weights. `draw` reads them, so that what is written
        into them is used from the next call on.
        """
        return {}

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
