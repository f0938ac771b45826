"""Action distributions in torch. Axes: A = elements of the leaf."""

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.config.settings import PolicySection
from penstock.policy.acting import drawing
from penstock.policy.acting.array_policy import kind_of, made
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiDiscrete

# ---- The contract of an action distribution.


class ActionHead(drawing.Drawing, nn.Module):
    """The distribution of one leaf of the action space. Arguments are those of `Drawing`."""

    def __init__(self, path: str, size: int, dtype: str) -> None:
        nn.Module.__init__(self)
        drawing.Drawing.__init__(self, path, size, dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return log-probabilities [...] of actions [..., *shape] as drawn, under parameters [..., size]."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return entropies [...] in nats of parameters [..., size]."""
        raise NotImplementedError


# ---- Distributions of choices and bits.


class Categorical(drawing.CategoricalDrawing, ActionHead):
    """One of n choices; parameters are logits."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        return functional.log_softmax(parameters, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        log_p = functional.log_softmax(parameters, -1)
        return -(log_p.exp() * log_p).sum(-1)


class MultiCategorical(drawing.MultiCategoricalDrawing, ActionHead):
    """Independent categoricals; their logits are concatenated."""

    def __init__(self, path: str, space: MultiDiscrete) -> None:
        super().__init__(path, space)
        self.parts = [Categorical(path, Discrete(n)) for n in space.nvec]

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        pieces = zip(self.parts, self.cuts, action.long().unbind(-1), strict=True)
        return torch.stack([part.log_prob(parameters[..., cut], a) for part, cut, a in pieces]).sum(0)

    def entropy(self, parameters: Tensor) -> Tensor:
        pieces = zip(self.parts, self.cuts, strict=True)
        return torch.stack([part.entropy(parameters[..., cut]) for part, cut in pieces]).sum(0)


class Bernoulli(drawing.BernoulliDrawing, ActionHead):
    """Independent bits; parameters are a logit for each."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        return functional.logsigmoid(torch.where(action.bool(), parameters, -parameters)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return (functional.softplus(parameters) - parameters * parameters.sigmoid()).sum(-1)


# ---- Action values of a network.


class EpsilonGreedy(drawing.EpsilonGreedyDrawing, Categorical):
    """One of n by its value, see `EpsilonGreedyDrawing`."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        return super().log_prob(_scaled(parameters), action)

    def entropy(self, parameters: Tensor) -> Tensor:
        return super().entropy(_scaled(parameters))


def _scaled(values: Tensor) -> Tensor:
    """Scale the values to ±1, so that rounding does not grow with them."""
    return values / values.abs().amax(-1, keepdim=True).clamp(min=1.0)


_QUADRATURE_NODES = 16


class Gaussian(drawing.GaussianDrawing, ActionHead):
    """Independent normals around the network's outputs, with standard deviations that are weights."""

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        super().__init__(path, space, initial_log_std)
        self.log_std = nn.Parameter(torch.full((self.size,), initial_log_std))

    def split(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return means [..., A] and logarithms of standard deviations, [A] or [..., A]."""
        return parameters, self.log_std

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self.split(parameters)
        scaled = (action.reshape(mean.shape).to(mean.dtype) - mean) * (-log_std).exp()
        return -0.5 * scaled.square().sum(-1) - (log_std.sum(-1) + self.count * drawing.HALF_LOG_TWO_PI)

    def entropy(self, parameters: Tensor) -> Tensor:
        entropy = self.split(parameters)[1].sum(-1) + self.count * (0.5 + drawing.HALF_LOG_TWO_PI)
        return entropy.expand(parameters.shape[:-1])

    def _log_std(self) -> drawing.Reals:
        # A view of the parameter, so that new weights are seen at once.
        array: drawing.Reals = self.log_std.detach().cpu().numpy()
        return array


class SquashedGaussian(drawing.SquashedGaussianDrawing, Gaussian):
    """tanh of a Gaussian, stretched to the bounds, see `SquashedGaussianDrawing`."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        raw = action.reshape(*parameters.shape[:-1], self.count).to(parameters.dtype)
        return super().log_prob(parameters, action) - log_tanh_slope(raw).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return super().entropy(parameters) + _mean_slope(*self.split(parameters)).sum(-1)


class ConditionalSquashedGaussian(drawing.ConditionalSquashedGaussianDrawing, SquashedGaussian):
    """A squashed Gaussian whose standard deviations are outputs of the network as well."""

    def split(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = parameters.split(self.count, -1)
        return mean, (log_std + self.initial_log_std).clamp(*drawing.LOG_STD_RANGE)


def _mean_slope(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return E[log(1 − tanh²u)] of normals u, [..., A], by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
    node = torch.as_tensor(nodes, dtype=mean.dtype, device=mean.device)
    weight = torch.as_tensor(weights / weights.sum(), dtype=mean.dtype, device=mean.device)
    drawn = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * node
    return (log_tanh_slope(drawn) * weight).sum(-1)


def log_tanh_slope(raw: Tensor) -> Tensor:
    """Return log(1 − tanh²u) without cancellation: 2(log 2 − u − softplus(−2u))."""
    return 2.0 * (math.log(2.0) - raw - functional.softplus(-2.0 * raw))


_HEADS: Final[dict[type[drawing.Drawing], type[ActionHead]]] = {
    drawing.CategoricalDrawing: Categorical,
    drawing.EpsilonGreedyDrawing: EpsilonGreedy,
    drawing.MultiCategoricalDrawing: MultiCategorical,
    drawing.BernoulliDrawing: Bernoulli,
    drawing.GaussianDrawing: Gaussian,
    drawing.SquashedGaussianDrawing: SquashedGaussian,
    drawing.ConditionalSquashedGaussianDrawing: ConditionalSquashedGaussian,
}


def head_of(path: str, leaf: Leaf, section: PolicySection) -> ActionHead:
    """Return the head of one leaf; raises ValueError that names an unsupported path and space."""
    return made(_HEADS[kind_of(path, leaf, section)], path, leaf, section)
