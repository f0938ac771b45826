"""Distributions of real numbers. Axes: A = elements of the leaf."""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.policy.acting.drawing import Reals
from penstock.policy.acting.gaussian_drawing import (
    ConditionalSquashedGaussianDrawing,
    GaussianDrawing,
    SquashedGaussianDrawing,
)
from penstock.policy.distributions.head import ActionHead, ClosedForm
from penstock.policy.numbers import Numbers, names_of
from penstock.protocol.spaces import Box

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_QUADRATURE_NODES = 16
_LOG_STD_RANGE = (-20.0, 2.0)


class Gaussian(GaussianDrawing, ActionHead):
    """Independent normals around the network's outputs, with a standard deviation of their own.

    Actions are drawn unbounded; the environment gets them clipped to the bounds. A = elements of the action.
    """

    has_slope = True

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

    def closed_form(self, parameters: Numbers, action: Numbers) -> ClosedForm:
        """Return log π(a), with ∂log π/∂μ = z/σ, ∂log π/∂log σ = z² − 1 and ∂H/∂log σ = 1; z = (a − μ)/σ."""
        names = names_of(parameters)
        log_std = self.log_std.detach() if names is torch else self._log_std()
        deviation = names.exp(-log_std)
        raw = names.asarray(action, dtype=parameters.dtype).reshape(parameters.shape)
        scaled = (raw - parameters) * deviation
        square = scaled * scaled

        def slopes(by_log_prob: Numbers, by_entropy: float) -> tuple[Numbers, list[Numbers]]:
            rows = by_log_prob[:, None]
            by_log_std = (rows * (square - 1.0)).sum(0) + by_entropy * len(rows)
            return rows * scaled * deviation, [by_log_std]

        constant = log_std.sum() + self.size * _HALF_LOG_TWO_PI
        return ClosedForm(-0.5 * square.sum(-1) - constant, slopes)

    def _log_std(self) -> Reals:
        # A view of the parameter, so that new weights are seen at once.
        array: Reals = self.log_std.detach().cpu().numpy()
        return array


class SquashedGaussian(SquashedGaussianDrawing, Gaussian):
    """tanh of a Gaussian, stretched to the bounds; actions are stored as before the tanh.

    Log-probability and entropy are those of tanh(u) in (−1, 1); stretching adds a constant to both.
    """

    has_slope = False  # its entropy has other slopes than a Gaussian's

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
