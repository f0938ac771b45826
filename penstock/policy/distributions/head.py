"""The contract of an action distribution: the head of one leaf of the action space.

The learner's half (`log_prob`, `entropy`) is torch and differentiable over any leading axes; the actor's half
(`Drawing`) is numpy over [N, size]. Both take `parameters`, the `size` outputs of the network that belong to
the leaf.
"""

from torch import Tensor, nn

from penstock.policy.acting.drawing import Drawing


class ActionHead(Drawing, nn.Module):
    """The distribution of one leaf of the action space. Arguments are those of `Drawing`."""

    has_slope = False
    """Whether `slope` is implemented, and is that of this head's own `log_prob` and `entropy`."""

    def __init__(self, path: str, size: int, dtype: str) -> None:
        nn.Module.__init__(self)
        Drawing.__init__(self, path, size, dtype)

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
