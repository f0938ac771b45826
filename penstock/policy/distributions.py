"""Action distributions: how the network's outputs become actions, log-probabilities and entropies.

One `ActionHead` per leaf of the action space. The learner's half (`log_prob`, `entropy`) is torch and
differentiable over any leading axes; the actor's half (`draw`, `mode`) is numpy over [N, size]. Both
take `parameters`, the `size` outputs of the network that belong to the leaf. Axes: A = elements of a leaf.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime.settings import PolicySection
from penstock.wire.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete
from penstock.wire.tensor import Array

Reals = NDArray[np.floating]

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_QUADRATURE_NODES = 16
_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_LOG_STD_RANGE = (-20.0, 2.0)


@dataclass(frozen=True, slots=True)
class Place:
    """Which environments a policy acts in: from number `first` on, of all `of` that the run's actors have."""

    first: int = 0
    of: int = 1


class ActionHead(nn.Module):
    """Distribution of one leaf of the action space.

    path: name of the action tensor.   size: outputs of the network that it needs.
    """

    def __init__(self, path: str, size: int, dtype: str) -> None:
        super().__init__()
        self.path = path
        self.size = size
        self.action_dtype = np.dtype(dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Parameters [..., size], action [..., *shape] as drawn → [...]."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Parameters [..., size] → [...], in nats."""
        raise NotImplementedError

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Parameters [N, size] → an action [N, *shape] and its log-probability [N]."""
        raise NotImplementedError

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """The most likely action (before squashing) and its log-probability, as `draw`."""
        raise NotImplementedError

    def explore(self, scalars: Mapping[str, float], place: Place) -> None:
        """Draw as the numbers say that came with the weights; most distributions need none."""

    def to_environment(self, action: Array) -> Array:
        """An action as drawn, [N, *shape], as the environment takes it."""
        return action

    def from_environment(self, action: Array) -> Array:
        """The action as drawn of one that an environment takes, both [N, *shape].

        Raises ValueError for one that this distribution cannot draw.
        """
        return action

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """Parameters [N, size] that give what is not `allowed` [N, size] no probability.

        Raises ValueError where nothing can be masked.
        """
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether a mask [size] holds each choice of an action as drawn, [*shape]."""
        raise ValueError(f"{self.path}: only a choice of one of n takes an action mask")

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """What `draw` draws from, by name: arrays [N, size]."""
        raise NotImplementedError


class Categorical(ActionHead):
    """One of n; logits."""

    def __init__(self, path: str, space: Discrete) -> None:
        super().__init__(path, space.n, space.dtype)
        self.start = space.start

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Log-softmax at the index."""
        return functional.log_softmax(parameters, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """−Σ p log p."""
        log_p = functional.log_softmax(parameters, -1)
        return -(log_p.exp() * log_p).sum(-1)

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Gumbel-max: argmax of logits − log of exponentials."""
        noise = random.standard_exponential(parameters.shape, dtype=np.float32)
        # A draw of exactly 0 has no logarithm; the smallest normal number stands in for it.
        np.maximum(noise, _SMALLEST_NORMAL, out=noise)
        np.log(noise, out=noise)
        return self._at(parameters, (parameters - noise).argmax(-1))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """The largest logit."""
        return self._at(parameters, parameters.argmax(-1))

    def to_environment(self, action: Array) -> Array:
        """Counted from the space's start."""
        return np.add(action, self.start) if self.start else action

    def from_environment(self, action: Array) -> Array:
        """Counted from 0."""
        index = np.subtract(action, self.start, dtype=np.int64)
        if not ((index >= 0) & (index < self.size)).all():
            raise ValueError(
                f"{self.path}={np.unique(action)[:4].tolist()}: must lie in {self.start}..{self.start + self.size - 1}"
            )
        return index.astype(self.action_dtype)

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """A logit of minus infinity where nothing is allowed."""
        if not allowed.any(-1).all():
            row = int(allowed.any(-1).argmin())
            raise ValueError(f"{self.path}: the mask of row {row} allows nothing")
        return np.where(allowed, parameters, parameters.dtype.type(-np.inf))

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The element at the index."""
        return allowed[np.atleast_1d(action).astype(np.intp)]

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Softmax."""
        share = np.exp(parameters - parameters.max(-1, keepdims=True))
        return {"probability": share / share.sum(-1, keepdims=True)}

    def _at(self, parameters: Reals, index: NDArray[np.intp]) -> tuple[Array, Reals]:
        shifted = parameters - parameters.max(-1, keepdims=True)
        log_p = shifted[np.arange(len(index)), index] - np.log(np.exp(shifted).sum(-1))
        return index.astype(self.action_dtype, copy=False), log_p


class EpsilonGreedy(Categorical):
    """One of n by its value: the best, but for a share ε of actions that are drawn uniformly (Watkins 1989).

    The network's outputs are action values, or differ from them by the same amount for all actions. ε comes with the weights
    as the scalar `epsilon`; environment i of N acts with ε^(1 + α·i/(N−1)), α the scalar `epsilon_spread` (Horgan
    et al. 2018, section 4.1). Until something came, and for who is told nothing, such as an evaluation, it is 0.

    `log_prob` and `entropy` are of the softmax over values scaled to ±1. Nobody learns from them: they tell by all
    values, and whatever ε is, which weights a policy has, for the probe.
    """

    def __init__(self, path: str, space: Discrete) -> None:
        super().__init__(path, space)
        self._epsilon, self._spread, self._place = 0.0, 0.0, Place()
        self._rates: Reals = np.zeros(0, np.float32)

    def explore(self, scalars: Mapping[str, float], place: Place) -> None:
        """`epsilon` and `epsilon_spread`."""
        self._epsilon, self._spread = scalars.get("epsilon", 0.0), scalars.get("epsilon_spread", 0.0)
        self._place, self._rates = place, np.zeros(0, np.float32)

    def rates(self, rows: int) -> Reals:
        """ε of each of so many rows, float32; rows beyond the last environment act as that one."""
        if len(self._rates) != rows:
            last = self._place.of - 1
            number = np.minimum(self._place.first + np.arange(rows), last)
            exponent = 1.0 + self._spread * number / max(last, 1)
            self._rates = (self._epsilon**exponent).astype(np.float32)
        return self._rates

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Of the softmax over scaled values."""
        return super().log_prob(_scaled(parameters), action)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Of the softmax over scaled values."""
        return super().entropy(_scaled(parameters))

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """ε-greedy."""
        rates, rows = self.rates(len(parameters)), len(parameters)
        # Of what may be chosen, the one with the largest draw; what is masked has no value.
        uniform = np.where(np.isfinite(parameters), random.random(parameters.shape, np.float32), -1.0)
        explores = random.random(rows, np.float32) < rates
        return self._chosen(parameters, np.where(explores, uniform.argmax(-1), parameters.argmax(-1)))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """The best."""
        return self._chosen(parameters, parameters.argmax(-1))

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Of ε-greedy."""
        allowed = np.isfinite(parameters)
        rates = self.rates(len(parameters))[:, None]
        probability = allowed * (rates / allowed.sum(-1, keepdims=True))
        probability[np.arange(len(parameters)), parameters.argmax(-1)] += 1.0 - rates[:, 0]
        return {"probability": probability}

    def _chosen(self, parameters: Reals, index: NDArray[np.intp]) -> tuple[Array, Reals]:
        probability = self.describe(parameters)["probability"][np.arange(len(index)), index]
        # The best where ε is 1 of many is drawn with probability 0 by rounding at worst.
        log_p = np.log(np.maximum(probability, _SMALLEST_NORMAL))
        return index.astype(self.action_dtype, copy=False), log_p


def _scaled(values: Tensor) -> Tensor:
    """So that rounding does not grow with the values."""
    return values / values.abs().amax(-1, keepdim=True).clamp(min=1.0)


class MultiCategorical(ActionHead):
    """Independent categoricals; their logits behind one another."""

    def __init__(self, path: str, space: MultiDiscrete) -> None:
        super().__init__(path, sum(space.nvec), space.dtype)
        self.parts = [Categorical(path, Discrete(n)) for n in space.nvec]
        ends = np.cumsum(space.nvec).tolist()
        self.cuts = [slice(end - n, end) for end, n in zip(ends, space.nvec, strict=True)]

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Sum over the parts."""
        pieces = zip(self.parts, self.cuts, action.long().unbind(-1), strict=True)
        return torch.stack([part.log_prob(parameters[..., cut], a) for part, cut, a in pieces]).sum(0)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Sum over the parts."""
        pieces = zip(self.parts, self.cuts, strict=True)
        return torch.stack([part.entropy(parameters[..., cut]) for part, cut in pieces]).sum(0)

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Each part on its own."""
        pieces = zip(self.parts, self.cuts, strict=True)
        return self._join([part.draw(parameters[:, cut], random) for part, cut in pieces])

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Each part's mode."""
        pieces = zip(self.parts, self.cuts, strict=True)
        return self._join([part.mode(parameters[:, cut]) for part, cut in pieces])

    def from_environment(self, action: Array) -> Array:
        """Checked part by part."""
        columns = zip(self.parts, np.moveaxis(action, -1, 0), strict=True)
        return np.stack([part.from_environment(column) for part, column in columns], -1)

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Each choice in its own cut."""
        each: NDArray[np.bool_] = allowed[action.astype(np.intp) + [cut.start for cut in self.cuts]]
        return each

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """The parts' softmaxes behind one another."""
        pieces = zip(self.parts, self.cuts, strict=True)
        shares = [part.describe(parameters[:, cut])["probability"] for part, cut in pieces]
        return {"probability": np.concatenate(shares, -1)}

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """Each choice on its own."""
        pieces = zip(self.parts, self.cuts, strict=True)
        return np.concatenate([part.masked(parameters[:, cut], allowed[:, cut]) for part, cut in pieces], -1)

    def _join(self, drawn: Sequence[tuple[Array, Reals]]) -> tuple[Array, Reals]:
        action = np.stack([a for a, _ in drawn], -1).astype(self.action_dtype, copy=False)
        return action, np.sum([p for _, p in drawn], 0)


class Bernoulli(ActionHead):
    """Independent bits; a logit each."""

    def __init__(self, path: str, space: MultiBinary) -> None:
        super().__init__(path, space.n, space.dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Σ log σ(±logit)."""
        return functional.logsigmoid(torch.where(action.bool(), parameters, -parameters)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Σ softplus(x) − x σ(x)."""
        return (functional.softplus(parameters) - parameters * parameters.sigmoid()).sum(-1)

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Logit against a logistic draw."""
        uniform = random.random(parameters.shape)
        return self._at(parameters, parameters > np.log(np.maximum(uniform, 1e-300)) - np.log1p(-uniform))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Bits whose logit is positive."""
        return self._at(parameters, parameters > 0)

    def from_environment(self, action: Array) -> Array:
        """Zeros and ones."""
        if not np.isin(action, (0, 1)).all():
            raise ValueError(f"{self.path}: bits are 0 or 1")
        return action

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Of a bit that is set."""
        return {"probability": 1 / (1 + np.exp(-parameters))}

    def _at(self, parameters: Reals, bits: NDArray[np.bool_]) -> tuple[Array, Reals]:
        log_p = -np.logaddexp(0, np.where(bits, -parameters, parameters)).sum(-1)
        return bits.astype(self.action_dtype), log_p


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
        """Sum of the normals' log-densities."""
        raw = action.reshape(parameters.shape).to(parameters.dtype)
        scaled = (raw - parameters) * (-self.log_std).exp()
        return -0.5 * scaled.square().sum(-1) - (self.log_std.sum() + self.size * _HALF_LOG_TWO_PI)

    def entropy(self, parameters: Tensor) -> Tensor:
        """½ log 2πe σ², summed: the same for every observation."""
        entropy = self.log_std.sum() + self.size * (0.5 + _HALF_LOG_TWO_PI)
        return entropy.expand(parameters.shape[:-1])

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Mean + σ·noise."""
        noise = random.standard_normal(parameters.shape, dtype=np.float32)
        return self._at(parameters, parameters + np.exp(self._log_std()) * noise)

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """The mean."""
        return self._at(parameters, parameters)

    def to_environment(self, action: Array) -> Array:
        """Clipped to the bounds."""
        return np.minimum(np.maximum(action, self.low), self.high)

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Of the Gaussian, before anything is clipped or squashed."""
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
    """tanh of a Gaussian, stretched to the bounds; actions are kept as before the tanh.

    Log-probability and entropy are those of tanh(u) in (−1, 1); stretching adds a constant to both.
    """

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Gaussian minus Σ log(1 − tanh²u)."""
        raw = action.reshape(parameters.shape).to(parameters.dtype)
        return super().log_prob(parameters, action) - log_tanh_slope(raw).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Gaussian entropy + Σ E[log(1 − tanh²u)], the expectation by Gauss-Hermite quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        node = torch.as_tensor(nodes, dtype=parameters.dtype, device=parameters.device)
        weight = torch.as_tensor(weights / weights.sum(), dtype=parameters.dtype, device=parameters.device)
        drawn = parameters.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * node
        return super().entropy(parameters) + (log_tanh_slope(drawn) * weight).sum((-1, -2))

    def to_environment(self, action: Array) -> Array:
        """tanh, then from (−1, 1) to (low, high)."""
        middle, half = 0.5 * (self.high + self.low), 0.5 * (self.high - self.low)
        return np.asarray(middle + half * np.tanh(np.asarray(action, self.action_dtype)), self.action_dtype)

    def from_environment(self, action: Array) -> Array:
        """Before the tanh."""
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
    """A squashed Gaussian whose standard deviations are outputs of the network, too (Haarnoja et al. 2018b, appendix C).

    Parameters are A means and A logarithms of standard deviations, held within −20..2. A = elements of the action.
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
        """Means and logarithms of standard deviations, [..., A] each."""
        mean, log_std = parameters.split(self.count, -1)
        return mean, (log_std + self.initial_log_std).clamp(*_LOG_STD_RANGE)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Gaussian minus Σ log(1 − tanh²u)."""
        mean, log_std = self.split(parameters)
        raw = action.reshape(mean.shape).to(mean.dtype)
        scaled = (raw - mean) * (-log_std).exp()
        density = 0.5 * scaled.square() + log_std + _HALF_LOG_TWO_PI + log_tanh_slope(raw)
        return -density.sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Gaussian entropy + Σ E[log(1 − tanh²u)], the expectation by Gauss-Hermite quadrature."""
        mean, log_std = self.split(parameters)
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        node = torch.as_tensor(nodes, dtype=mean.dtype, device=mean.device)
        weight = torch.as_tensor(weights / weights.sum(), dtype=mean.dtype, device=mean.device)
        drawn = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * node
        squashed = (log_tanh_slope(drawn) * weight).sum(-1)
        return (log_std + 0.5 + _HALF_LOG_TWO_PI + squashed).sum(-1)

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Mean + σ·noise."""
        mean, log_std = self._split(parameters)
        noise = random.standard_normal(mean.shape, dtype=np.float32)
        return self._at(parameters, mean + np.exp(log_std) * noise)

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """The mean."""
        return self._at(parameters, self._split(parameters)[0])

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Of the Gaussian, before it is squashed."""
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
    """log(1 − tanh²u) without cancellation: 2(log 2 − u − softplus(−2u))."""
    return 2.0 * (math.log(2.0) - raw - functional.softplus(-2.0 * raw))


def head_of(path: str, leaf: Leaf, section: PolicySection) -> ActionHead:
    """The head of one leaf; raises ValueError that names path and space for one that has none."""
    match leaf:
        case Discrete():
            kind = EpsilonGreedy if section.discrete == "epsilon_greedy" else Categorical
            return kind(path, leaf)
        case MultiDiscrete():
            return MultiCategorical(path, leaf)
        case MultiBinary():
            return Bernoulli(path, leaf)
        case Box():
            return _box_head(path, leaf, section)


def _box_head(path: str, leaf: Box, section: PolicySection) -> Gaussian:
    if not np.issubdtype(np.dtype(leaf.dtype), np.floating) or math.prod(leaf.shape) == 0:
        raise ValueError(
            f"action_space at {path!r}: {leaf!r} cannot be drawn from; "
            "a Box of actions must hold at least one float, use Discrete or MultiDiscrete for integers"
        )
    if section.continuous == "clipped":
        return Gaussian(path, leaf, section.initial_log_std)
    if not (np.isfinite(leaf.low).all() and np.isfinite(leaf.high).all()):
        raise ValueError(
            f"action_space at {path!r}: {leaf!r} has no finite bounds to squash into; "
            "set policy.continuous=clipped, which PPO can learn with"
        )
    kind = ConditionalSquashedGaussian if section.state_dependent_std else SquashedGaussian
    return kind(path, leaf, section.initial_log_std)
