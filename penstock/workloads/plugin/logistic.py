"""Logistic regression with a ridge: `fit_logistic`, and its `sigmoid`."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["fit_logistic", "sigmoid"]

Array = NDArray[np.float64]
_ROUNDS: Final = 100
_SMALLEST: Final = 1e-10


def sigmoid(scores: Array) -> Array:
    """Return 1 / (1 + exp(−score)) without overflow."""
    return 0.5 * (1 + np.tanh(scores / 2))


def fit_logistic(inputs: Array, shares: Array, ridge: Array, towards: Array) -> Array:
    """Return the weights w [d] that minimise Σ log(1 + eᶻ) − share · z + Σ ridge (w − towards)² / 2, float64.

    z = inputs · w. Newton's steps are halved until they descend: whole ones may lead ever further away.

    Args:
        inputs: float64 [n, d].
        shares: float64 [n], 0 to 1.
        ridge: float64 [d], above 0, so that there is one finite minimum.
        towards: float64 [d], the weights without data.
    """
    weights = np.array(towards, np.float64)

    def loss(weights: Array) -> float:
        scores = inputs @ weights
        return float((np.logaddexp(0, scores) - shares * scores).sum() + ridge @ (weights - towards) ** 2 / 2)

    here = loss(weights)
    for _ in range(_ROUNDS):
        chance = sigmoid(inputs @ weights)
        slope = inputs.T @ (shares - chance) - ridge * (weights - towards)
        curve = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + np.diag(ridge)
        step, size = np.linalg.lstsq(curve, slope, rcond=None)[0], 1.0
        while size > _SMALLEST and not loss(weights + size * step) < here:
            size /= 2
        if size <= _SMALLEST:
            break
        weights = weights + size * step
        here = loss(weights)
    return weights
