"""A model of what follows an action, for the doubly robust estimate: ridge regression for each action.

It is cross-fitted: what it says of an episode comes from the other half of the episodes. So the doubly robust
estimate has no bias however bad the model is; a good one makes its interval narrower.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.goals.off_policy.decisions import Floats

_RIDGE: Final = 1.0


def returns_from(episode: NDArray[np.int64], reward: Floats, discount: float) -> Floats:
    """Return Σ_k γ^k r_{t+k} of every decision until the end of its episode, float64 [n].

    episode: int64 [n], those of one episode together. reward: float64 [n].
    """
    total = np.array(reward, np.float64)
    for index in range(len(total) - 2, -1, -1):
        if episode[index] == episode[index + 1]:
            total[index] += discount * total[index + 1]
    return total


def cross_fitted(
    seen: NDArray[np.float32],
    action: NDArray[np.int64],
    returns: Floats,
    episode: NDArray[np.int64],
    actions: int,
) -> Floats:
    """Return the model's return of every action at every decision, float64 [n, actions].

    seen: float32 [n, d]. action: int64 [n], what was done. returns: float64 [n], what followed.
    episode: int64 [n]; even and odd ones predict each other.
    """
    predicted = np.zeros((len(seen), actions))
    for half in (0, 1):
        fit, use = episode % 2 == half, episode % 2 != half
        if not fit.any() or not use.any():
            continue
        mean, scale = seen[fit].mean(0), seen[fit].std(0) + 1e-6
        inputs = np.clip((seen - mean) / scale, -10, 10).astype(np.float64)
        for one in range(actions):
            rows = fit & (action == one)
            predicted[use, one] = ridge(inputs[rows], returns[rows], inputs[use], float(returns[fit].mean()))
    return predicted


def ridge(inputs: Floats, wanted: Floats, asked: Floats, otherwise: float) -> Floats:
    """Return the regression's values at `asked` [m, d], float64 [m].

    inputs: float64 [n, d]. wanted: float64 [n]. otherwise: the value where there is nothing to fit.
    """
    if not len(inputs):
        return np.full(len(asked), otherwise)
    centre, level = inputs.mean(0), wanted.mean()
    inside = inputs - centre
    slope = np.linalg.solve(inside.T @ inside + _RIDGE * np.eye(inside.shape[1]), inside.T @ (wanted - level))
    values: Floats = level + (asked - centre) @ slope
    return values
