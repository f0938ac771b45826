"""Drawing of real numbers, in numpy. Axes: A = elements of the leaf."""

import math
from typing import Any

import numpy as np

from penstock.policy.acting.drawing import Drawing, Reals
from penstock.protocol.spaces import Box
from penstock.protocol.tensor import Array

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_LOG_STD_RANGE = (-20.0, 2.0)


class GaussianDrawing(Drawing):
    """Independent normals around the network's outputs, with a standard deviation of their own.

    Parameters are means [N, A]. Actions [N, *shape] are drawn unbounded, and the environment gets them
    clipped to the bounds. A = elements of the action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        count = math.prod(space.shape)
        super().__init__(path, count, space.dtype)
        self._take_bounds(space)
        self._drawn_log_std: Reals = np.full(count, initial_log_std, np.float32)

    def _take_bounds(self, space: Box) -> None:
        self.shape = space.shape
        self.low: Reals = np.asarray(space.low, self.action_dtype)
        self.high: Reals = np.asarray(space.high, self.action_dtype)

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw mean + σ·noise."""
        noise = random.standard_normal(parameters.shape, dtype=np.float32)
        return self._at(parameters, parameters + np.exp(self._log_std()) * noise)

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the mean."""
        return self._at(parameters, parameters)

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-density of an action as drawn, [N]."""
        raw: Any = action.reshape(len(parameters), -1)
        return self._at(parameters, raw)[1]

    def own_weights(self) -> dict[str, Array]:
        """Return the logarithms of the standard deviations, float32 [A]."""
        return {"log_std": self._log_std()}

    def to_environment(self, action: Array) -> Array:
        """Clip actions to the bounds."""
        return np.minimum(np.maximum(action, self.low), self.high)

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return `mean` and `std` of the Gaussian, before clipping or squashing."""
        std = np.broadcast_to(np.exp(self._log_std()), parameters.shape)
        return {"mean": parameters, "std": std}

    def _log_std(self) -> Reals:
        return self._drawn_log_std

    def _at(self, parameters: Reals, raw: Reals) -> tuple[Array, Reals]:
        # The log-probability belongs to the action as it is sent, rounded to its dtype.
        action = raw.astype(self.action_dtype)
        log_std = self._log_std()
        scaled = (action - parameters) * np.exp(-log_std)
        log_p = -0.5 * np.square(scaled).sum(-1) - (log_std.sum() + self.size * _HALF_LOG_TWO_PI)
        return action.reshape(len(parameters), *self.shape), log_p


class SquashedGaussianDrawing(GaussianDrawing):
    """Draws the tanh of a Gaussian, stretched to the bounds.

    Actions [N, *shape] are stored as before the tanh. Log-probability and entropy are those of tanh(u)
    in (−1, 1); stretching adds a constant to both.
    """

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


class ConditionalSquashedGaussianDrawing(SquashedGaussianDrawing):
    """A squashed Gaussian whose standard deviations are outputs of the network as well.

    See Haarnoja et al. 2018b, appendix C. Parameters, [N, 2 A], are A means and A logarithms of standard
    deviations, held within −20..2. A = elements of the action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        Drawing.__init__(self, path, 2 * math.prod(space.shape), space.dtype)
        self._take(space, initial_log_std)

    def _take(self, space: Box, initial_log_std: float) -> None:
        self._take_bounds(space)
        self.count = math.prod(space.shape)
        self.initial_log_std = initial_log_std

    def own_weights(self) -> dict[str, Array]:
        """Return nothing: the standard deviations are outputs of the network."""
        return {}

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
