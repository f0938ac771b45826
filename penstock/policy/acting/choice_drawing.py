"""Drawing of choices and bits, in numpy."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.policy.acting.drawing import SMALLEST_NORMAL, Drawing, Reals
from penstock.protocol.spaces import Discrete, MultiBinary, MultiDiscrete
from penstock.protocol.tensor import FEW, Array


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
        # A draw of exactly 0 has no logarithm; the smallest normal number stands in for it.
        np.maximum(noise, SMALLEST_NORMAL, out=noise)
        np.log(noise, out=noise)
        return self._at(parameters, (parameters - noise).argmax(-1))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the choice with the largest logit."""
        return self._at(parameters, parameters.argmax(-1))

    def to_environment(self, action: Array) -> Array:
        """Return indices counted from the space's start."""
        return np.add(action, self.start) if self.start else action

    def from_environment(self, action: Array) -> Array:
        """Return indices counted from 0; raises ValueError for one that is not in the space."""
        index = np.subtract(action, self.start, dtype=np.int64)
        if not ((index >= 0) & (index < self.size)).all():
            raise ValueError(
                f"{self.path}={np.unique(action)[:4].tolist()}: must lie in "
                f"{self.start}..{self.start + self.size - 1}"
            )
        return index.astype(self.action_dtype)

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """Return parameters with a logit of minus infinity where a choice is not allowed.

        Raises ValueError for a row that allows nothing.
        """
        if not allowed.any(-1).all():
            row = int(allowed.any(-1).argmin())
            raise ValueError(f"{self.path}: the mask of row {row} allows nothing")
        return np.where(allowed, parameters, parameters.dtype.type(-np.inf))

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-softmax at the index, [N]."""
        return self._at(parameters, action.astype(np.intp))[1]

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the element of the mask at the index."""
        return allowed[np.atleast_1d(action).astype(np.intp)]

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return the softmax as `probability`."""
        probability = np.exp(parameters - parameters.max(-1, keepdims=True))
        return {"probability": probability / probability.sum(-1, keepdims=True)}

    def _at(self, parameters: Reals, index: NDArray[np.intp]) -> tuple[Array, Reals]:
        shifted = parameters - parameters.max(-1, keepdims=True)
        log_p = shifted[np.arange(len(index)), index] - np.log(np.exp(shifted).sum(-1))
        return index.astype(self.action_dtype, copy=False), log_p

    def _of_one(self, parameters: Reals, noise: Reals) -> tuple[Array, Reals]:
        """Draw for a single row of few choices, equal to `draw` but for rounding.

        For so few numbers plain Python takes less time than a call of numpy.
        """
        logits: list[float] = parameters[0].tolist()
        draws: list[float] = noise[0].tolist()
        scores = [
            logit - math.log(draw or SMALLEST_NORMAL) for logit, draw in zip(logits, draws, strict=True)
        ]
        index, top = scores.index(max(scores)), max(logits)
        log_p = logits[index] - top - math.log(sum([math.exp(logit - top) for logit in logits]))
        return np.array([index], self.action_dtype), np.array([log_p], parameters.dtype)


class MultiCategoricalDrawing(Drawing):
    """Draws p independent choices; parameters are their logits behind one another, [N, size].

    Actions are indices [N, p], masks bool [N, size].
    """

    def __init__(self, path: str, space: MultiDiscrete) -> None:
        super().__init__(path, sum(space.nvec), space.dtype)
        self.drawn_parts = [CategoricalDrawing(path, Discrete(n)) for n in space.nvec]
        ends = np.cumsum(space.nvec).tolist()
        self.cuts = [slice(end - n, end) for end, n in zip(ends, space.nvec, strict=True)]

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw each part independently."""
        pieces = zip(self.drawn_parts, self.cuts, strict=True)
        return self._join([part.draw(parameters[:, cut], random) for part, cut in pieces])

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the mode of each part."""
        pieces = zip(self.drawn_parts, self.cuts, strict=True)
        return self._join([part.mode(parameters[:, cut]) for part, cut in pieces])

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return the sum over the parts, [N]."""
        pieces = zip(self.drawn_parts, self.cuts, np.moveaxis(action, -1, 0), strict=True)
        total: Reals = np.sum([part.chance(parameters[:, cut], column) for part, cut, column in pieces], 0)
        return total

    def from_environment(self, action: Array) -> Array:
        """Convert each part; raises ValueError for one that is not in the space."""
        columns = zip(self.drawn_parts, np.moveaxis(action, -1, 0), strict=True)
        return np.stack([part.from_environment(column) for part, column in columns], -1)

    def allows(self, action: Array, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return, for each choice, the element of its own part of the mask."""
        each: NDArray[np.bool_] = allowed[action.astype(np.intp) + [cut.start for cut in self.cuts]]
        return each

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return the softmaxes of the parts behind one another."""
        pieces = zip(self.drawn_parts, self.cuts, strict=True)
        probabilities = [part.describe(parameters[:, cut])["probability"] for part, cut in pieces]
        return {"probability": np.concatenate(probabilities, -1)}

    def masked(self, parameters: Reals, allowed: NDArray[np.bool_]) -> Reals:
        """Mask each part independently."""
        pieces = zip(self.drawn_parts, self.cuts, strict=True)
        return np.concatenate([part.masked(parameters[:, cut], allowed[:, cut]) for part, cut in pieces], -1)

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
        """Return the bits whose logit is positive as 1."""
        return self._at(parameters, parameters > 0)

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return Σ log σ(±logit), [N]."""
        return self._at(parameters, action.astype(np.bool_))[1]

    def from_environment(self, action: Array) -> Array:
        """Return the bits; raises ValueError for other numbers than 0 and 1."""
        if not np.isin(action, (0, 1)).all():
            raise ValueError(f"{self.path}: bits are 0 or 1")
        return action

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return the probability that each bit is set."""
        return {"probability": 1 / (1 + np.exp(-parameters))}

    def _at(self, parameters: Reals, bits: NDArray[np.bool_]) -> tuple[Array, Reals]:
        log_p = -np.logaddexp(0, np.where(bits, -parameters, parameters)).sum(-1)
        return bits.astype(self.action_dtype), log_p
