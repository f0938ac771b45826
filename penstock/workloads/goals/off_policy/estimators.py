"""Off-policy estimates of a policy's mean return, each with a 95 % interval.

    w_t = Π_{k ≤ t} π(a_k) / μ(a_k)             the weight of an episode up to its decision t
    IPS              mean over episodes of Σ_t γ^t w_t r_t
    self-normalised  Σ_t γ^t (Σ_i w_it r_it / Σ_i w_it)
    doubly robust    mean over episodes of Σ_t γ^t (w_t (r_t − q_t) + w_{t−1} v_t)

Per-decision importance sampling and its weighted form are those of Precup, Sutton and Singh (2000), the
doubly robust estimate that of Jiang and Li (2016). An episode that has ended keeps its last weight and earns
0. Intervals are normal, from the variance between episodes, or decisions for
the mean ratio; that of the self-normalised estimate is its delta
method. Where single decisions hardly ever earned something else, intervals of shares are at least kept.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.workloads.goals.off_policy.decisions import Decisions, Floats

_Z: Final = 1.959963984540054
"""95 % of a normal distribution lie within so many standard deviations."""
_FEW: Final = 5.0
"""Of fewer decisions that earned something else a normal interval says too little."""
_LARGEST_LOG: Final = 300.0
"""Above it weights and their squares overflow; one of them leaves an effective sample size of 1 anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def standard_error(self) -> float:
        """Return the standard deviation of the estimate, of which the interval is ± 1.96."""
        return (self.high - self.low) / (2 * _Z)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Estimates of one policy's mean return per episode.

    mean_ratio: of π / μ over all decisions, 1 in expectation where the logged probabilities are true and the
    judged policy does nothing that the other never did. effective: effective sample size in episodes, at the
    decision where it is smallest.
    """

    ips: Estimate
    self_normalised: Estimate
    doubly_robust: Estimate
    mean_ratio: Estimate
    effective: float


def estimate(decisions: Decisions, discount: float) -> Estimates:
    """Return the estimates from at least two episodes.

    discount: γ, from 0 to 1. Raises ValueError for fewer episodes, which have no variance.
    """
    count = decisions.episodes
    if count < 2:
        raise ValueError(f"{count} episodes: an interval needs at least 2")
    ips, doubly, normalised = np.zeros(count), np.zeros(count), np.zeros(count)
    log_weight, before = np.zeros(count), np.ones(count)
    mean, effective = 0.0, float(count)
    ratio = decisions.log_target - decisions.log_logged
    by_step = decisions.by_step()
    order = np.argsort(by_step, kind="stable")
    for step, rows in enumerate(np.split(order, np.cumsum(np.bincount(by_step))[:-1])):
        here, scale = decisions.episode[rows], discount**step
        log_weight[here] += ratio[rows]
        weight = np.exp(np.minimum(log_weight, _LARGEST_LOG))
        reward, predicted, expected = np.zeros(count), np.zeros(count), np.zeros(count)
        reward[here] = decisions.reward[rows]
        predicted[here], expected[here] = decisions.predicted[rows], decisions.expected[rows]
        ips += scale * weight * reward
        doubly += scale * (weight * (reward - predicted) + before * expected)
        total = weight.sum()
        if total > 0:
            value = float(weight @ reward / total)
            mean += scale * value
            normalised += scale * weight * (reward - value) * count / total
        effective = min(effective, _effective(weight))
        before = weight
    normal, robust = _of(normalised + mean), _of(doubly)
    if count == len(decisions.reward):
        normal, robust = (_widened(one, decisions.reward, effective) for one in (normal, robust))
    return Estimates(
        ips=_of(ips),
        self_normalised=normal,
        doubly_robust=robust,
        mean_ratio=_of(np.exp(np.minimum(ratio, _LARGEST_LOG))),
        effective=effective,
    )


def _widened(found: Estimate, reward: Floats, effective: float) -> Estimate:
    """Return an estimate of single decisions that lies near the least or the most that was ever earned.

    The few that earned something else are then hardly in the sample, nor is their variance. So the interval
    is at least that of a share with two successes and two failures added (Agresti and Coull 1998).
    """
    low, high = float(reward.min()), float(reward.max())
    if high == low:
        return found
    share = min(max((found.value - low) / (high - low), 0.0), 1.0)
    if effective * min(share, 1 - share) >= _FEW:
        return found
    drawn = (effective * share + 2) / (effective + 4)
    half = _Z * float(np.sqrt(drawn * (1 - drawn) / (effective + 4))) * (high - low)
    return Estimate(
        value=found.value, low=min(found.low, found.value - half), high=max(found.high, found.value + half)
    )


def _effective(weight: Floats) -> float:
    """(Σw)² / Σw², Kish's effective sample size; 0 where no weight is above 0."""
    largest = float(weight.max())
    if largest == 0:
        return 0.0
    scaled = weight / largest
    return float(scaled.sum() ** 2 / (scaled @ scaled))


def _of(samples: Floats) -> Estimate:
    """Return the mean of one number per episode, with its interval."""
    value = float(samples.mean())
    half = _Z * float(samples.std(ddof=1)) / np.sqrt(len(samples))
    return Estimate(value=value, low=value - float(half), high=value + float(half))
