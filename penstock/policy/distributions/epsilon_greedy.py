"""Action values of a network."""

from torch import Tensor

from penstock.policy.acting.greedy_drawing import EpsilonGreedyDrawing
from penstock.policy.distributions.discrete import Categorical


class EpsilonGreedy(EpsilonGreedyDrawing, Categorical):
    """One of n by its value: the best, but for a share ε of actions that are drawn uniformly (Watkins 1989).

    The network's outputs are action values, or differ from them by the same amount for all actions. ε comes
    with the weights as the scalar `epsilon`; environment i of N acts with ε^(1 + α·i/(N−1)), α the scalar
    `epsilon_spread` (Horgan et al. 2018, section 4.1). Until the scalars arrive, and where none are given,
    such as in an evaluation, ε is 0.

    `log_prob` and `entropy` are of the softmax over values scaled to ±1. No algorithm learns from them: they
    serve the probe, which tells weights apart by all values, whatever ε is.
    """

    has_slope = False  # that of a choice is not of scaled values

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability under the softmax over scaled values."""
        return super().log_prob(_scaled(parameters), action)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy of the softmax over scaled values."""
        return super().entropy(_scaled(parameters))


def _scaled(values: Tensor) -> Tensor:
    """Scale the values to ±1, so that rounding does not grow with them."""
    return values / values.abs().amax(-1, keepdim=True).clamp(min=1.0)
