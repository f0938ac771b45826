"""The contract of an action distribution: the head of one leaf of the action space.

The learner's half (`log_prob`, `entropy`) is torch and differentiable over any leading axes; the actor's half
(`Drawing`) is numpy over [N, size]. Both take `parameters`, the `size` outputs of the network that belong to
the leaf.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.policy.acting.drawing import Drawing
from penstock.policy.numbers import Numbers, names_of


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Log-probabilities of actions, and their slopes without a graph.

    log_prob: [n].
    slopes: from ∂L/∂log π of each row, [n], and ∂L/∂H of every row, a float, to ∂L/∂parameters, [n, size],
        and ∂L by each parameter that the head itself has, in their order and of their shapes.
    """

    log_prob: Numbers
    slopes: Callable[[Numbers, float], tuple[Numbers, list[Numbers]]]


def joint(forms: Sequence[ClosedForm]) -> ClosedForm:
    """Return the closed form of independent parts, whose parameters stand behind one another."""
    if len(forms) == 1:
        return forms[0]

    def slopes(by_log_prob: Numbers, by_entropy: float) -> tuple[Numbers, list[Numbers]]:
        by_parameters, own = zip(*(form.slopes(by_log_prob, by_entropy) for form in forms), strict=True)
        return names_of(by_log_prob).concatenate(by_parameters, -1), [one for part in own for one in part]

    return ClosedForm(sum(form.log_prob for form in forms), slopes)


class ActionHead(Drawing, nn.Module):
    """The distribution of one leaf of the action space. Arguments are those of `Drawing`."""

    has_slope = False
    """Whether `closed_form` is implemented, and is that of this head's own `log_prob` and `entropy`."""

    def __init__(self, path: str, size: int, dtype: str) -> None:
        nn.Module.__init__(self)
        Drawing.__init__(self, path, size, dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return log-probabilities [...] of actions [..., *shape] as drawn, under parameters [..., size]."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return entropies [...] in nats of parameters [..., size]."""
        raise NotImplementedError

    def closed_form(self, parameters: Numbers, action: Numbers) -> ClosedForm:
        """Return log-probabilities and what their slopes are, without a graph.

        parameters: outputs of the network, [n, size]. action: as drawn, [n, *shape]. Both are tensors or both
        are arrays, and so is what comes back.
        """
        raise NotImplementedError
