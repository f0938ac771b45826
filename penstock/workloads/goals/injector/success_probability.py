"""How likely a goal succeeds: a logistic fit of the last outcomes on the logit of π(a) (Platt 1999).

A policy's certainty π(a) says how sure it is that a goal is the best, not that the goal succeeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

LAST: Final = 200
"""Outcomes that are fitted."""
_FEWEST: Final = 20
"""Outcomes below which the rate alone is told, drawn to one half."""
_RIDGE: Final = 1.0
_ROUNDS: Final = 25
_BINS: Final = 5
_LARGEST_LOGIT: Final = 8.0


@dataclass(frozen=True, slots=True)
class SuccessFit:
    """Probability of success = σ(offset + slope · logit π(a))."""

    offset: float
    slope: float

    def at(self, certainty: float) -> float:
        return 1 / (1 + math.exp(-(self.offset + self.slope * _logit(certainty))))


def fit_success(certainties: Sequence[float], successes: Sequence[bool]) -> SuccessFit:
    """Fit the last 200 outcomes; with fewer than 20 the slope is 0 and the rate that of Laplace."""
    seen = np.array([_logit(one) for one in certainties[-LAST:]], np.float64)
    well = np.array(successes[-LAST:], np.float64)
    rate = (well.sum() + 1) / (len(well) + 2)
    weights = np.array([math.log(rate / (1 - rate)), 0.0])
    if len(well) < _FEWEST:
        return SuccessFit(float(weights[0]), 0.0)
    # The likelihood with a ridge on the slope is maximised by Newton's method on both numbers.
    inputs, ridge = np.stack([np.ones_like(seen), seen], 1), np.diag([1e-3, _RIDGE])
    for _ in range(_ROUNDS):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        slope = inputs.T @ (well - chance) - ridge @ weights
        curve = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + ridge
        weights = weights + np.linalg.solve(curve, slope)
    return SuccessFit(float(weights[0]), float(weights[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How well probabilities fit what happened.

    brier: mean squared error. gap: mean distance between probability and rate over five groups of equal size,
    from the least to the most likely. outcomes: how many were judged.
    """

    brier: float
    gap: float
    outcomes: int


def reliability(told: Sequence[float], successes: Sequence[bool]) -> Reliability | None:
    """Return how well probabilities that were told before fit the last 200 outcomes; None below 20."""
    chance, well = np.array(told[-LAST:], np.float64), np.array(successes[-LAST:], np.float64)
    if len(well) < _FEWEST:
        return None
    groups = np.array_split(np.argsort(chance, kind="stable"), _BINS)
    gaps = [abs(chance[group].mean() - well[group].mean()) * len(group) for group in groups]
    return Reliability(
        brier=float(((chance - well) ** 2).mean()), gap=float(sum(gaps) / len(well)), outcomes=len(well)
    )


def _logit(probability: float) -> float:
    if probability <= 0:
        return -_LARGEST_LOGIT
    if probability >= 1:
        return _LARGEST_LOGIT
    return min(max(math.log(probability / (1 - probability)), -_LARGEST_LOGIT), _LARGEST_LOGIT)
