"""Propensities where the log has none: the policy that acted is imitated, by multinomial logistic regression.

They are estimates. `traces evaluate` does not use them, and a recording that has them says so.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_STEPS: Final = 300
_RATE: Final = 0.5
_RIDGE: Final = 1e-3
_LEAST: Final = 1e-3
"""No action that was logged is taken for rarer."""


@dataclass(frozen=True, slots=True)
class PropensityModel:
    """What acted, imitated.

    centre, scale: float32 [d], of what was seen. weights: float64 [d + 1, actions].
    """

    centre: NDArray[np.float32]
    scale: NDArray[np.float32]
    weights: NDArray[np.float64]

    @classmethod
    def fit(cls, seen: NDArray[np.float32], action: NDArray[np.int64], actions: int) -> "PropensityModel":
        """Return the imitation of decisions. seen: float32 [n, d]. action: int64 [n], below `actions`."""
        model = cls(seen.mean(0), seen.std(0) + 1e-6, np.zeros((seen.shape[1] + 1, actions)))
        inputs, wanted = model._inputs(seen), np.eye(actions)[action]
        weights = model.weights
        # The largest eigenvalue of the inputs bounds the curvature, so that no step goes too far.
        rate = _RATE * len(inputs) / max(float(np.linalg.norm(inputs, 2)) ** 2, 1e-12) * 2
        for _ in range(_STEPS):
            gradient = inputs.T @ (_softmax(inputs @ weights) - wanted) / len(inputs) + _RIDGE * weights
            weights -= rate * gradient
        return model

    def of(self, seen: NDArray[np.float32], action: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the estimated probability of each action that was taken, float64 [n]."""
        chances = _softmax(self._inputs(seen) @ self.weights)
        return np.maximum(chances[np.arange(len(action)), action], _LEAST)

    def _inputs(self, seen: NDArray[np.float32]) -> NDArray[np.float64]:
        inputs = np.clip((seen - self.centre) / self.scale, -10, 10).astype(np.float64)
        return np.hstack([inputs, np.ones((len(seen), 1))])


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return shares
