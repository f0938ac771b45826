"""Action values, and how an actor explores with them, in numpy."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.policy.acting.choice_drawing import CategoricalDrawing
from penstock.policy.acting.drawing import SMALLEST_NORMAL, ExplorationSlots, Reals
from penstock.protocol.spaces import Discrete
from penstock.protocol.tensor import Array


class EpsilonGreedyDrawing(CategoricalDrawing):
    """One of n by its value: the best, but for a share ε of actions that are drawn uniformly (Watkins 1989).

    The network's outputs are action values, or differ from them by the same amount for all actions. ε comes
    with the weights as the scalar `epsilon`; environment i of N acts with ε^(1 + α·i/(N−1)), α the scalar
    `epsilon_spread` (Horgan et al. 2018, section 4.1). Until the scalars arrive, and where none are given,
    such as in an evaluation, ε is 0.

    Where the scalar `temperature` is above 0, it draws from the softmax over values divided by it, and
    ε does not count: a policy server gives it, so that probabilities say how much better an action is.

    `log_prob` and `entropy` are of the softmax over values scaled to ±1. No algorithm learns from them: they
    serve the probe, which tells weights apart by all values, whatever ε is.
    """

    def __init__(self, path: str, space: Discrete) -> None:
        super().__init__(path, space)
        self._epsilon, self._spread, self._place = 0.0, 0.0, ExplorationSlots()
        self._temperature = 0.0
        self._rates: Reals = np.zeros(0, np.float32)

    @property
    def chooses_by_value(self) -> bool:
        """Return whether what is random in a draw is exploration alone; it is not where a softmax draws."""
        return not self._temperature

    def explore(self, scalars: Mapping[str, float], place: ExplorationSlots) -> None:
        """Take ε, α and the temperature from `epsilon`, `epsilon_spread` and `temperature`."""
        self._temperature = scalars.get("temperature", 0.0)
        self._epsilon, self._spread = scalars.get("epsilon", 0.0), scalars.get("epsilon_spread", 0.0)
        self._place, self._rates = place, np.zeros(0, np.float32)

    def rates(self, rows: int) -> Reals:
        """Return ε of each of so many rows, float32; rows beyond the last environment act as that one."""
        if len(self._rates) != rows:
            last = self._place.of - 1
            number = np.minimum(self._place.first + np.arange(rows), last)
            exponent = 1.0 + self._spread * number / max(last, 1)
            self._rates = (self._epsilon**exponent).astype(np.float32)
        return self._rates

    def draw(self, parameters: Reals, random: np.random.Generator) -> tuple[Array, Reals]:
        """Draw ε-greedily, or from the softmax; parameters: values [N, n]."""
        if self._temperature:
            return super().draw(self._logits(parameters), random)
        rates, rows = self.rates(len(parameters)), len(parameters)
        # Of what may be chosen, the one with the largest draw; what is masked has no value.
        uniform = np.where(np.isfinite(parameters), random.random(parameters.shape, np.float32), -1.0)
        explores = random.random(rows, np.float32) < rates
        return self._chosen(parameters, np.where(explores, uniform.argmax(-1), parameters.argmax(-1)))

    def mode(self, parameters: Reals) -> tuple[Array, Reals]:
        """Return the best action, [N], and its log-probability; parameters: values [N, n]."""
        if self._temperature:
            return super().mode(self._logits(parameters))
        return self._chosen(parameters, parameters.argmax(-1))

    def chance(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-probability with which `draw` gives these actions, [N]."""
        if self._temperature:
            return super().chance(self._logits(parameters), action)
        return self._chosen(parameters, action.astype(np.intp))[1]

    def probe_log_prob(self, parameters: Reals, action: Array) -> Reals:
        """Return the log-softmax over scaled values, [N]: all values tell weights apart, whatever ε is."""
        most = np.abs(parameters, where=np.isfinite(parameters), out=np.zeros_like(parameters))
        scaled = parameters / np.maximum(most.max(-1, keepdims=True), 1)
        return super().chance(scaled, action)

    def describe(self, parameters: Reals) -> dict[str, Reals]:
        """Return the probabilities of the draw."""
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
        # The best where ε is 1 of many is drawn with probability 0 by rounding at worst.
        log_p = np.log(np.maximum(probability, SMALLEST_NORMAL))
        return index.astype(self.action_dtype, copy=False), log_p
