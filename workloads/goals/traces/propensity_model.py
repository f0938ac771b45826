"""Propensities where the log has none: the policy that acted is imitated, by multinomial logistic regression.

They are estimates. `traces evaluate` does not use them, and a recording that has them says so.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_STEPS: Final = 300
_RATE: Final = 0.5
_RIDGE: Final = 1e-3
_LEAST: Final = 1e-3
"""No action that was logged is taken for rarer."""


def estimated_propensities(
    seen: NDArray[np.float32], action: NDArray[np.int64], actions: int
) -> NDArray[np.float64]:
    """Return the estimated probability of each action that was taken, float64 [n].

    seen: float32 [n, d]. action: int64 [n], below `actions`.
    """
    scale = seen.std(0) + 1e-6
    inputs = np.clip((seen - seen.mean(0)) / scale, -10, 10).astype(np.float64)
    inputs = np.hstack([inputs, np.ones((len(seen), 1))])
    wanted = np.eye(actions)[action]
    weights = np.zeros((inputs.shape[1], actions))
    # The largest eigenvalue of the inputs bounds the curvature, so that no step goes too far.
    rate = _RATE * len(inputs) / max(float(np.linalg.norm(inputs, 2)) ** 2, 1e-12) * 2
    for _ in range(_STEPS):
        gradient = inputs.T @ (_softmax(inputs @ weights) - wanted) / len(inputs) + _RIDGE * weights
        weights -= rate * gradient
    told: NDArray[np.float64] = _softmax(inputs @ weights)[np.arange(len(action)), action]
    return np.maximum(told, _LEAST)


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return shares
