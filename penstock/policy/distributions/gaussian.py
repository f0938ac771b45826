"""Distributions of real numbers. Axes: A = elements of the leaf."""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.policy.distributions.head import ActionHead, Reals
from penstock.wire.spaces import Box
from penstock.wire.tensor import Array

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_QUADRATURE_NODES = 16
_LOG_STD_RANGE = (-20.0, 2.0)


class Gaussian(ActionHead):
    """Independent normals around the network's outputs, with a standard deviation of their own.

    Actions are drawn unbounded; the environment gets them clipped to the bounds. A = elements of the action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        count = math.prod(space.shape)
        super().__init__(path, count, space.dtype)
        self.shape = space.shape
        self.low: Reals = np.asarray(space.low, self.action_dtype)
        self.high: Reals = np.asarray(space.high, self.action_dtype)
        self.log_std = nn.Parameter(torch.full((count,), initial_log_std))

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the sum of the normals' log-densities."""
        raw = action.reshape(parameters.shape).to(parameters.dtype)
        scaled = (raw - parameters) * (-self.log_std).exp()
        return -0.5 * scaled.square().sum(-1) - (self.log_std.sum() + self.size * _HALF_LOG_TWO_PI)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return Σ ½ log 2πe σ²: the same for every observation."""
        entropy = self.log_std.sum() + self.size * (0.5 + _HALF_LOG_TWO_PI)
        return entropy.expand(parameters.shape[:-1])

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw mean + σ·noise."""
        noise = random.standard_normal(parameters.shape, dtype=np.float32)
        return self._at(parameters, parameters + np.exp(self._log_std()) * noise)

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the mean."""
        return self._at(parameters, parameters)

    def to_environment(self, action: Array) -> Array:
        """Clip actions to the bounds."""
        return np.minimum(np.maximum(action, self.low), self.high)

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return `mean` and `std` of the Gaussian, before clipping or squashing."""
        std = np.broadcast_to(np.exp(self._log_std()), parameters.shape)
        return {"mean": parameters, "std": std}

    def _log_std(self) -> Reals:
        # A view of the parameter, so that new weights are seen at once.
        array: Reals = self.log_std.detach().cpu().numpy()
        return array

    def _at(self, parameters: Reals, raw: Reals) -> tuple[Array, Reals]:
        # The log-probability belongs to the action as it is sent, rounded to its dtype.
        action = raw.astype(self.action_dtype)
        log_std = self._log_std()
        scaled = (action - parameters) * np.exp(-log_std)
        log_p = -0.5 * np.square(scaled).sum(-1) - (log_std.sum() + self.size * _HALF_LOG_TWO_PI)
        return action.reshape(len(parameters), *self.shape), log_p


class SquashedGaussian(Gaussian):
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

    def to_environment(self, action: Array) -> Array:
        """Return tanh of the actions, stretched from (−1, 1) to (low, high)."""
        middle, half = 0.5 * (self.high + self.low), 0.5 * (self.high - self.low)
        return np.asarray(middle + half * np.tanh(np.asarray(action, self.action_dtype)), self.action_dtype)

    def from_environment(self, action: Array) -> Array:
        """Return actions before the tanh; raises ValueError for one outside the bounds."""
        middle, half = 0.5 * (self.high + self.low), 0.5 * (self.high - self.low)
        inside = (np.asarray(action, self.action_dtype) - middle) / half
        if not (np.abs(inside) < 1).all():
            raise ValueError(
                f"{self.path}: a squashed action lies inside its bounds, never on or beyond them"
            )
        return np.asarray(np.arctanh(inside), self.action_dtype)

    def _at(self, parameters: Reals, raw: Reals) -> tuple[Array, Reals]:
        action, log_p = super()._at(parameters, raw)
        flat: Reals = np.asarray(action, self.action_dtype).reshape(parameters.shape)
        slope = 2.0 * (math.log(2.0) - flat - np.logaddexp(0, -2.0 * flat))
        return action, log_p - slope.sum(-1)


class ConditionalSquashedGaussian(SquashedGaussian):
    """A squashed Gaussian whose standard deviations are outputs of the network as well.

    See Haarnoja et al. 2018b, appendix C. Parameters are A means and A logarithms of standard deviations,
    held within −20..2. A = elements of the action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        count = math.prod(space.shape)
        ActionHead.__init__(self, path, 2 * count, space.dtype)
        self.count = count
        self.shape = space.shape
        self.low = np.asarray(space.low, self.action_dtype)
        self.high = np.asarray(space.high, self.action_dtype)
        self.initial_log_std = initial_log_std

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

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw mean + σ·noise."""
        mean, log_std = self._split(parameters)
        noise = random.standard_normal(mean.shape, dtype=np.float32)
        return self._at(parameters, mean + np.exp(log_std) * noise)

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the mean."""
        return self._at(parameters, self._split(parameters)[0])

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return `mean` and `std` of the Gaussian, before squashing."""
        mean, log_std = self._split(parameters)
        return {"mean": mean, "std": np.exp(log_std)}

    def _split(self, parameters: Reals) -> tuple[Reals, Reals]:
        mean, log_std = parameters[..., : self.count], parameters[..., self.count :]
        return mean, np.clip(log_std + parameters.dtype.type(self.initial_log_std), *_LOG_STD_RANGE)

    def _at(self, parameters: Reals, raw: Reals) -> tuple[Array, Reals]:
        mean, log_std = self._split(parameters)
        action = raw.astype(self.action_dtype)
        scaled = (action - mean) * np.exp(-log_std)
        slope = 2.0 * (math.log(2.0) - action - np.logaddexp(0, -2.0 * action))
        log_p = -(0.5 * np.square(scaled) + log_std + _HALF_LOG_TWO_PI + slope).sum(-1)
        return action.reshape(len(parameters), *self.shape), log_p


def log_tanh_slope(raw: Tensor) -> Tensor:
    """Return log(1 − tanh²u) without cancellation: 2(log 2 − u − softplus(−2u))."""
    return 2.0 * (math.log(2.0) - raw - functional.softplus(-2.0 * raw))
