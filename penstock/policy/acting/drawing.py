"""The actor's part of action distributions, in numpy; `penstock.policy.distributions` has the learner's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from penstock.protocol.tensor import FEW, Array

Reals = NDArray[np.floating]
SMALLEST_NORMAL = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class ExplorationSlots:
    """The slots of a policy among the slots of all actors, which determine its exploration rates.

    first: number of its first slot. of: number of slots of all actors.
    """

    first: int = 0
    of: int = 1


class Drawing:
    """Draws the actions of one leaf of the action space from `parameters`, the network's outputs for it.

    path: name of the action tensor. size: of the parameters. A subclass defines `draw`, `mode`, `chance` and
    `describe`.
    """

    def __init__(self, path: str, size: int, dtype: str) -> None:
        self.path = path
        self.size = size
        self.action_dtype = np.dtype(dtype)

    @property
    def chooses_by_value(self) -> bool:
        """Whether outputs are action values, and only exploration draws other actions than the best."""
        return False

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw from parameters [N, size]: an action [N, *shape] and its log-probability [N]."""
        raise NotImplementedError

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the most likely action (before squashing) and its log-probability, as `draw` does."""
        raise NotImplementedError

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-probability [N] with which `draw` draws an action [N, *shape]."""
        raise NotImplementedError

    def probe_log_prob(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-probability [N] of an action [N, *shape] as the learner's part computes it."""
        return self.chance(parameters, action)

    def explore(self, scalars: Mapping[str, float], place: ExplorationSlots) -> None:
        """Set the exploration of `draw` by scalars that came with the weights."""

    def own_weights(self) -> dict[str, Array]:
        """Return the weights of the distribution itself, by name; `draw` reads them."""
        return {}

    def to_environment(self, action: Array) -> Array:
        """Convert an action as drawn, [N, *shape], to the form of the environment."""
        return action

    def from_environment(self, action: Array) -> Array:
        """Convert an action in the form of the environment to that of `draw`, both [N, *shape]."""
        return action

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """Return parameters [N, size] with probability 0 for what is not `allowed`, bool [N, size]."""
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whether a mask [size] allows each choice of an action as drawn, [*shape]."""
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return the distribution that `draw` draws from, by name: arrays [N, size]."""
        raise NotImplementedError


# ---- Drawing of choices and bits, in numpy.


class CategoricalDrawing(Drawing):
    """Draws one of n choices; parameters are logits [N, n], actions indices [N], masks bool [N, n]."""

    def __init__(self, path: str, space: Discrete) -> None:
        super().__init__(path, space.n, space.dtype)
        self.start = space.start

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw by Gumbel-max: argmax of logits − log of exponentials."""
        noise = random.standard_exponential(parameters.shape, dtype=np.float32)
        if len(noise) == 1 and self.size <= FEW:
            return self._of_one(parameters, noise)
        # The logarithm of a draw of exactly 0 is infinite; the smallest normal number replaces it.
        np.maximum(noise, SMALLEST_NORMAL, out=noise)
        np.log(noise, out=noise)
        return self._at(parameters, (parameters - noise).argmax(-1))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        return self._at(parameters, parameters.argmax(-1))

    def to_environment(self, action: Array) -> Array:
        return np.add(action, self.start) if self.start else action

    def from_environment(self, action: Array) -> Array:
        index = np.subtract(action, self.start, dtype=np.int64)
        if not ((index >= 0) & (index < self.size)).all():
            raise ValueError(
                f"{self.path}={np.unique(action)[:4].tolist()}: must lie in "
                f"{self.start}..{self.start + self.size - 1}"
            )
        return index.astype(self.action_dtype)

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        if not allowed.any(-1).all():
            row = int(allowed.any(-1).argmin())
            raise ValueError(f"{self.path}: the mask of row {row} allows nothing")
        return np.where(allowed, parameters, parameters.dtype.type(-np.inf))

    def chance(self, parameters: Reals, action: Array) -> Reals:
        return self._at(parameters, action.astype(np.intp))[1]

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return allowed[np.atleast_1d(action).astype(np.intp)]

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        probability = np.exp(parameters - parameters.max(-1, keepdims=True))
        return {"probability": probability / probability.sum(-1, keepdims=True)}

    def _at(self, parameters: Reals, index: NDArray[np.intp]) -> tuple[Array, Reals]:
        shifted = parameters - parameters.max(-1, keepdims=True)
        log_p = shifted[np.arange(len(index)), index] - np.log(np.exp(shifted).sum(-1))
        return index.astype(self.action_dtype, copy=False), log_p

    def _of_one(self, parameters: Reals, noise: Reals) -> tuple[Array, Reals]:
        """Draw for a single row of few choices, equal to `draw` but for rounding."""
        logits: list[float] = parameters[0].tolist()
        draws: list[float] = noise[0].tolist()
        scores = [
            logit - math.log(draw or SMALLEST_NORMAL) for logit, draw in zip(logits, draws, strict=True)
        ]
        index, top = scores.index(max(scores)), max(logits)
        log_p = logits[index] - top - math.log(sum([math.exp(logit - top) for logit in logits]))
        return np.array([index], self.action_dtype), np.array([log_p], parameters.dtype)


class MultiCategoricalDrawing(Drawing):
    """Draws p independent choices [N, p]; their parameters and masks are concatenated, [N, size]."""

    def __init__(self, path: str, space: MultiDiscrete) -> None:
        super().__init__(path, sum(space.nvec), space.dtype)
        self.drawn_parts = [CategoricalDrawing(path, Discrete(n)) for n in space.nvec]
        ends = np.cumsum(space.nvec).tolist()
        self.cuts = [slice(end - n, end) for end, n in zip(ends, space.nvec, strict=True)]

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        return self._join([part.draw(own, random) for part, own in self._each(parameters)])

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        return self._join([part.mode(own) for part, own in self._each(parameters)])

    def chance(self, parameters: Reals, action: Array) -> Reals:
        pieces = zip(self._each(parameters), np.moveaxis(action, -1, 0), strict=True)
        total: Reals = np.sum([part.chance(own, column) for (part, own), column in pieces], 0)
        return total

    def from_environment(self, action: Array) -> Array:
        columns = zip(self.drawn_parts, np.moveaxis(action, -1, 0), strict=True)
        return np.stack([part.from_environment(column) for part, column in columns], -1)

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        each: NDArray[np.bool_] = allowed[action.astype(np.intp) + [cut.start for cut in self.cuts]]
        return each

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        probabilities = [part.describe(own)["probability"] for part, own in self._each(parameters)]
        return {"probability": np.concatenate(probabilities, -1)}

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        pieces = zip(self.drawn_parts, self.cuts, strict=True)
        return np.concatenate([part.masked(parameters[:, cut], allowed[:, cut]) for part, cut in pieces], -1)

    def _each(self, parameters: Reals) -> Iterator[tuple[CategoricalDrawing, Reals]]:
        return ((part, parameters[:, cut]) for part, cut in zip(self.drawn_parts, self.cuts, strict=True))

    def _join(self, drawn: Sequence[tuple[Array, Reals]]) -> tuple[Array, Reals]:
        action = np.stack([a for a, _ in drawn], -1).astype(self.action_dtype, copy=False)
        return action, np.sum([p for _, p in drawn], 0)


class BernoulliDrawing(Drawing):
    """Draws n independent bits; parameters are logits [N, n], actions [N, n]."""

    def __init__(self, path: str, space: MultiBinary) -> None:
        super().__init__(path, space.n, space.dtype)

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw by comparing each logit with a logistic draw."""
        uniform = random.random(parameters.shape)
        return self._at(parameters, parameters > np.log(np.maximum(uniform, 1e-300)) - np.log1p(-uniform))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        return self._at(parameters, parameters > 0)

    def chance(self, parameters: Reals, action: Array) -> Reals:
        return self._at(parameters, action.astype(np.bool_))[1]

    def from_environment(self, action: Array) -> Array:
        if not np.isin(action, (0, 1)).all():
            raise ValueError(f"{self.path}: bits are 0 or 1")
        return action

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        return {"probability": 1 / (1 + np.exp(-parameters))}

    def _at(self, parameters: Reals, bits: NDArray[np.bool_]) -> tuple[Array, Reals]:
        log_p = -np.logaddexp(0, np.where(bits, -parameters, parameters)).sum(-1)
        return bits.astype(self.action_dtype), log_p


# ---- Drawing of real numbers, in numpy.

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
LOG_STD_RANGE = (-20.0, 2.0)
LARGEST_BOUND = 1e18
"""Size from which on a bound, such as the largest float32, counts as none."""


class GaussianDrawing(Drawing):
    """Independent normals around the network's outputs, with standard deviations that are weights.

    Parameters are means [N, A]. Actions [N, *shape] are drawn unbounded. For the environment −1..1 is
    stretched to the bounds, where both are finite, and what lies beyond is clipped. A = elements of the
    action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        super().__init__(path, math.prod(space.shape), space.dtype)
        self._take_bounds(space)
        self._drawn_log_std: Reals = np.full(self.count, initial_log_std, np.float32)

    def _take_bounds(self, space: Box) -> None:
        self.shape, self.count = space.shape, math.prod(space.shape)
        self.low: Reals = np.asarray(space.low, self.action_dtype)
        self.high: Reals = np.asarray(space.high, self.action_dtype)
        low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
        is_known = (np.abs(low) < LARGEST_BOUND) & (np.abs(high) < LARGEST_BOUND)
        low, high = np.where(is_known, low, -1.0), np.where(is_known, high, 1.0)
        self.centre, self.reach = 0.5 * (high + low), 0.5 * (high - low)
        self._is_unit = bool((self.centre == 0).all() and (self.reach == 1).all())

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        mean, log_std = self._split(parameters)
        noise = random.standard_normal(mean.shape, dtype=np.float32)
        return self._at(parameters, mean + np.exp(log_std) * noise)

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        return self._at(parameters, self._split(parameters)[0])

    def chance(self, parameters: Reals, action: Array) -> Reals:
        raw: Any = action.reshape(len(parameters), -1)
        return self._at(parameters, raw)[1]

    def own_weights(self) -> dict[str, Array]:
        return {"log_std": self._log_std()}

    def to_environment(self, action: Array) -> Array:
        return self._clipped(action) if self._is_unit else self._stretched(action)

    def from_environment(self, action: Array) -> Array:
        return action if self._is_unit else np.asarray(self._shrunk(action), self.action_dtype)

    def _stretched(self, inside: Any) -> Array:
        """Stretch −1..1 to the bounds; rounding could leave them, so the result is clipped."""
        return self._clipped((self.centre + self.reach * inside).astype(self.action_dtype))

    def _shrunk(self, action: Any) -> NDArray[np.float64]:
        """Return where an action [N, *shape] lies within its bounds, as −1..1."""
        inside: NDArray[np.float64] = (action - self.centre) / np.where(self.reach == 0, 1.0, self.reach)
        return inside

    def _clipped(self, action: Array) -> Array:
        return np.minimum(np.maximum(action, self.low), self.high)

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        mean, log_std = self._split(parameters)
        return {"mean": mean, "std": np.broadcast_to(np.exp(log_std), mean.shape)}

    def _split(self, parameters: Reals) -> tuple[Reals, Reals]:
        """Return the means [N, A] and the logarithms of the standard deviations, [A] or [N, A]."""
        return parameters, self._log_std()

    def _log_std(self) -> Reals:
        return self._drawn_log_std

    def _at(self, parameters: Reals, raw: Reals) -> tuple[Array, Reals]:
        # The log-probability is that of the action as it is sent, rounded to its dtype.
        action = raw.astype(self.action_dtype)
        mean, log_std = self._split(parameters)
        scaled = (action - mean) * np.exp(-log_std)
        log_p = -0.5 * np.square(scaled).sum(-1) - (log_std.sum(-1) + self.count * HALF_LOG_TWO_PI)
        return action.reshape(len(parameters), *self.shape), log_p


class SquashedGaussianDrawing(GaussianDrawing):
    """Draws the tanh of a Gaussian, stretched to the bounds.

    Actions [N, *shape] are stored as before the tanh. Log-probability and entropy are those of tanh(u)
    in (−1, 1); stretching adds a constant to both.
    """

    def to_environment(self, action: Array) -> Array:
        return self._stretched(np.tanh(np.asarray(action, np.float64)))

    def from_environment(self, action: Array) -> Array:
        inside = self._shrunk(action)
        if not (np.abs(inside) < 1).all():
            raise ValueError(
                f"{self.path}: a squashed action lies inside its bounds, never on or beyond them"
            )
        return np.asarray(np.arctanh(inside), self.action_dtype)

    def _at(self, parameters: Reals, raw: Reals) -> tuple[Array, Reals]:
        action, log_p = super()._at(parameters, raw)
        flat: Reals = np.asarray(action, self.action_dtype).reshape(len(parameters), -1)
        slope = 2.0 * (math.log(2.0) - flat - np.logaddexp(0, -2.0 * flat))
        return action, log_p - slope.sum(-1)


class ConditionalSquashedGaussianDrawing(SquashedGaussianDrawing):
    """A squashed Gaussian whose standard deviations are outputs of the network as well.

    See Haarnoja et al. 2018b, appendix C. Parameters, [N, 2 A], are A means and A logarithms of standard
    deviations, held within −20..2. A = elements of the action.
    """

    def __init__(self, path: str, space: Box, initial_log_std: float) -> None:
        # Not that of the Gaussian, whose deviations are weights.
        super(GaussianDrawing, self).__init__(path, 2 * math.prod(space.shape), space.dtype)
        self._take_bounds(space)
        self.initial_log_std = initial_log_std

    def own_weights(self) -> dict[str, Array]:
        return {}

    def _split(self, parameters: Reals) -> tuple[Reals, Reals]:
        mean, log_std = parameters[..., : self.count], parameters[..., self.count :]
        return mean, np.clip(log_std + parameters.dtype.type(self.initial_log_std), *LOG_STD_RANGE)


# ---- Action values and exploration, in numpy.


class EpsilonGreedyDrawing(CategoricalDrawing):
    """One of n by its value: the best, but for a share ε of actions that are drawn uniformly (Watkins 1989).

    The network's outputs are action values, or differ from them by the same amount for all actions. ε comes
    with the weights as the scalar `epsilon`; environment i of N acts with ε^(1 + α·i/(N−1)), α the scalar
    `epsilon_spread` (Horgan et al. 2018, section 4.1). Until the scalars arrive, and where none are given,
    such as in an evaluation, ε is 0.

    With a scalar `temperature` above 0, actions are drawn from the softmax of values / temperature, and ε has
    no effect: a policy server sets it, so that probabilities show how much better an action is.

    `log_prob` and `entropy` are those of the softmax over values scaled to ±1. No algorithm learns from them:
    the probe needs them to distinguish weights by all values, whatever ε is.
    """

    def __init__(self, path: str, space: Discrete) -> None:
        super().__init__(path, space)
        self._epsilon, self._spread, self._place = 0.0, 0.0, ExplorationSlots()
        self._temperature = 0.0
        self._rates: Reals = np.zeros(0, np.float32)

    @property
    def chooses_by_value(self) -> bool:
        """Whether only exploration is random in a draw, which is not so with a temperature."""
        return not self._temperature

    def explore(self, scalars: Mapping[str, float], place: ExplorationSlots) -> None:
        self._temperature = scalars.get("temperature", 0.0)
        self._epsilon, self._spread = scalars.get("epsilon", 0.0), scalars.get("epsilon_spread", 0.0)
        self._place, self._rates = place, np.zeros(0, np.float32)

    def rates(self, rows: int) -> Reals:
        """Return ε of each row, float32 [rows]; rows beyond the last environment have its ε."""
        if len(self._rates) != rows:
            last = self._place.of - 1
            number = np.minimum(self._place.first + np.arange(rows), last)
            exponent = 1.0 + self._spread * number / max(last, 1)
            self._rates = (self._epsilon**exponent).astype(np.float32)
        return self._rates

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        if self._temperature:
            return super().draw(self._logits(parameters), random)
        rates, rows = self.rates(len(parameters)), len(parameters)
        # The allowed action with the largest draw; masked ones have no finite value.
        uniform = np.where(np.isfinite(parameters), random.random(parameters.shape, np.float32), -1.0)
        explores = random.random(rows, np.float32) < rates
        return self._chosen(parameters, np.where(explores, uniform.argmax(-1), parameters.argmax(-1)))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        if self._temperature:
            return super().mode(self._logits(parameters))
        return self._chosen(parameters, parameters.argmax(-1))

    def chance(self, parameters: Reals, action: Array) -> Reals:
        if self._temperature:
            return super().chance(self._logits(parameters), action)
        return self._chosen(parameters, action.astype(np.intp))[1]

    def probe_log_prob(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-softmax over scaled values, [N]: it depends on all values, whatever ε is."""
        most = np.abs(parameters, where=np.isfinite(parameters), out=np.zeros_like(parameters))
        scaled = parameters / np.maximum(most.max(-1, keepdims=True), 1)
        return super().chance(scaled, action)

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        if self._temperature:
            return super().describe(self._logits(parameters))
        allowed = np.isfinite(parameters)
        rates = self.rates(len(parameters))[:, None]
        probability = allowed * (rates / allowed.sum(-1, keepdims=True))
        probability[np.arange(len(parameters)), parameters.argmax(-1)] += 1.0 - rates[:, 0]
        return {"probability": probability}

    def _logits(self, parameters: Reals) -> Reals:
        return parameters / parameters.dtype.type(self._temperature)

    def _chosen(self, parameters: Reals, index: NDArray[np.intp]) -> tuple[Array, Reals]:
        probability = self.describe(parameters)["probability"][np.arange(len(index)), index]
        # Rounding may give the best of many actions probability 0 where ε is 1.
        log_p = np.log(np.maximum(probability, SMALLEST_NORMAL))
        return index.astype(self.action_dtype, copy=False), log_p
