"""Action distributions in torch. Axes: A = elements of the leaf."""

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.config.settings import PolicySection
from penstock.policy.acting.array_policy import Kinds
from penstock.policy.acting.drawing import (
    BernoulliDrawing,
    CategoricalDrawing,
    ConditionalSquashedGaussianDrawing,
    Drawing,
    EpsilonGreedyDrawing,
    GaussianDrawing,
    MultiCategoricalDrawing,
    Reals,
    SquashedGaussianDrawing,
)
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiDiscrete

# ---- The contract of an action distribution: the head of one leaf of the action space.


class ActionHead(Drawing, nn.Module):
    """The distribution of one leaf of the action space. Arguments are those of `Drawing`."""

    def __init__(self, path: str, size: int, dtype: str) -> None:
        nn.Module.__init__(self)
        Drawing.__init__(self, path, size, dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return log-probabilities [...] of actions [..., *shape] as drawn, under parameters [..., size]."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return entropies [...] in nats of parameters [..., size]."""
        raise NotImplementedError


# ---- Distributions of choices and bits.


class Categorical(CategoricalDrawing, ActionHead):
    """One of n choices; parameters are logits."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-softmax at the index, [...]."""
        return functional.log_softmax(parameters, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return −Σ p log p, [...]."""
        log_p = functional.log_softmax(parameters, -1)
        return -(log_p.exp() * log_p).sum(-1)


class MultiCategorical(MultiCategoricalDrawing, ActionHead):
    """Independent categoricals; their logits stand behind one another."""

    def __init__(self, path: str, space: MultiDiscrete) -> None:
        super().__init__(path, space)
        self.parts = [Categorical(path, Discrete(n)) for n in space.nvec]

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the sum over the parts."""
        pieces = zip(self.parts, self.cuts, action.long().unbind(-1), strict=True)
        return torch.stack([part.log_prob(parameters[..., cut], a) for part, cut, a in pieces]).sum(0)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the sum over the parts."""
        pieces = zip(self.parts, self.cuts, strict=True)
        return torch.stack([part.entropy(parameters[..., cut]) for part, cut in pieces]).sum(0)


class Bernoulli(BernoulliDrawing, ActionHead):
    """Independent bits; parameters are a logit for each."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return Σ log σ(±logit)."""
        return functional.logsigmoid(torch.where(action.bool(), parameters, -parameters)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return Σ softplus(x) − x σ(x)."""
        return (functional.softplus(parameters) - parameters * parameters.sigmoid()).sum(-1)


# ---- Action values of a network.


class EpsilonGreedy(EpsilonGreedyDrawing, Categorical):
    """One of n by its value: the best, but for a share ε of actions that are drawn uniformly (Watkins 1989).

    The network's outputs are action values, or differ from them by the same amount for all actions. ε comes
    with the weights as the scalar `epsilon`; environment i of N acts with ε^(1 + α·i/(N−1)), α the scalar
    `epsilon_spread` (Horgan et al. 2018, section 4.1). Until the scalars arrive, and where none are given,
    such as in an evaluation, ε is 0.

    `log_prob` and `entropy` are of the softmax over values scaled to ±1. No algorithm learns from them: they
    serve the probe, which tells weights apart by all values, whatever ε is.
    """

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability under the softmax over scaled values."""
        return super().log_prob(_scaled(parameters), action)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy of the softmax over scaled values."""
        return super().entropy(_scaled(parameters))


def _scaled(values: Tensor) -> Tensor:
    """Scale the values to ±1, so that rounding does not grow with them."""
    return values / values.abs().amax(-1, keepdim=True).clamp(min=1.0)


_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_QUADRATURE_NODES = 16
_LOG_STD_RANGE = (-20.0, 2.0)


class Gaussian(GaussianDrawing, ActionHead):
    """Independent normals around the network's outputs, with a standard deviation of their own.

    Actions are drawn unbounded; the environment gets them clipped to the bounds. A = elements of the action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        super().__init__(path, space, initial_log_std)
        self.log_std = nn.Parameter(torch.full((self.size,), initial_log_std))

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the sum of the normals' log-densities."""
        raw = action.reshape(parameters.shape).to(parameters.dtype)
        scaled = (raw - parameters) * (-self.log_std).exp()
        return -0.5 * scaled.square().sum(-1) - (self.log_std.sum() + self.size * _HALF_LOG_TWO_PI)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return Σ ½ log 2πe σ²: the same for every observation."""
        entropy = self.log_std.sum() + self.size * (0.5 + _HALF_LOG_TWO_PI)
        return entropy.expand(parameters.shape[:-1])

    def _log_std(self) -> Reals:
        # A view of the parameter, so that new weights are seen at once.
        array: Reals = self.log_std.detach().cpu().numpy()
        return array


class SquashedGaussian(SquashedGaussianDrawing, Gaussian):
    """tanh of a Gaussian, stretched to the bounds; actions are stored as before the tanh.

    Log-probability and entropy are those of tanh(u) in (−1, 1); stretching adds a constant to both.
    """

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the Gaussian's log-density minus Σ log(1 − tanh²u)."""
        raw = action.reshape(parameters.shape).to(parameters.dtype)
        return super().log_prob(parameters, action) - log_tanh_slope(raw).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return Gaussian entropy + Σ E[log(1 − tanh²u)], the expectation by Gauss-Hermite quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        node = torch.as_tensor(nodes, dtype=parameters.dtype, device=parameters.device)
        weight = torch.as_tensor(weights / weights.sum(), dtype=parameters.dtype, device=parameters.device)
        drawn = parameters.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * node
        return super().entropy(parameters) + (log_tanh_slope(drawn) * weight).sum((-1, -2))


class ConditionalSquashedGaussian(ConditionalSquashedGaussianDrawing, SquashedGaussian):
    """A squashed Gaussian whose standard deviations are outputs of the network as well.

    See Haarnoja et al. 2018b, appendix C. Parameters are A means and A logarithms of standard deviations,
    held within −20..2. A = elements of the action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        ActionHead.__init__(self, path, 2 * math.prod(space.shape), space.dtype)
        self._take(space, initial_log_std)

    def split(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and logarithms of standard deviations, [..., A] each."""
        mean, log_std = parameters.split(self.count, -1)
        return mean, (log_std + self.initial_log_std).clamp(*_LOG_STD_RANGE)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the Gaussian's log-density minus Σ log(1 − tanh²u)."""
        mean, log_std = self.split(parameters)
        raw = action.reshape(mean.shape).to(mean.dtype)
        scaled = (raw - mean) * (-log_std).exp()
        density = 0.5 * scaled.square() + log_std + _HALF_LOG_TWO_PI + log_tanh_slope(raw)
        return -density.sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return Gaussian entropy + Σ E[log(1 − tanh²u)], the expectation by Gauss-Hermite quadrature."""
        mean, log_std = self.split(parameters)
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        node = torch.as_tensor(nodes, dtype=mean.dtype, device=mean.device)
        weight = torch.as_tensor(weights / weights.sum(), dtype=mean.dtype, device=mean.device)
        drawn = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * node
        squashed = (log_tanh_slope(drawn) * weight).sum(-1)
        return (log_std + 0.5 + _HALF_LOG_TWO_PI + squashed).sum(-1)


def log_tanh_slope(raw: Tensor) -> Tensor:
    """Return log(1 − tanh²u) without cancellation: 2(log 2 − u − softplus(−2u))."""
    return 2.0 * (math.log(2.0) - raw - functional.softplus(-2.0 * raw))


__all__ = [
    "ActionHead",
    "Bernoulli",
    "Categorical",
    "ConditionalSquashedGaussian",
    "EpsilonGreedy",
    "Gaussian",
    "MultiCategorical",
    "SquashedGaussian",
    "head_of",
]

_HEADS: Final[Kinds[ActionHead]] = Kinds(
    categorical=Categorical,
    epsilon_greedy=EpsilonGreedy,
    multi_categorical=MultiCategorical,
    bernoulli=Bernoulli,
    gaussian=Gaussian,
    squashed=SquashedGaussian,
    conditional=ConditionalSquashedGaussian,
)


def head_of(path: str, leaf: Leaf, section: PolicySection) -> ActionHead:
    """Return the head of one leaf; raises ValueError that names path and space of a leaf that has none."""
    return _HEADS.of_leaf(path, leaf, section)
