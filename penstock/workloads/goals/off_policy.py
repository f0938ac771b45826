"""Off-policy estimates of a policy's mean return, each with a 95 % interval.

    w_t = Π_{k ≤ t} π(a_k) / μ(a_k)             the weight of an episode up to its decision t
    IPS              mean over episodes of Σ_t γ^t w_t r_t
    self-normalised  Σ_t γ^t (Σ_i w_it r_it / Σ_i w_it)
    doubly robust    mean over episodes of Σ_t γ^t (w_t (r_t − q_t) + w_{t−1} v_t)

Per-decision importance sampling and its weighted form are those of Precup, Sutton and Singh (2000), the
doubly robust estimate that of Jiang and Li (2016). An episode that has ended keeps its last weight and earns
0. Intervals are normal, from the variance between episodes, or between decisions for the mean ratio; that of
the self-normalised estimate is by the delta method. Where single decisions have nearly all the same reward,
intervals are at least those of a share.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# ---- A log as arrays: each decision with its reward, and the probabilities that both policies give it.

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decisions:
    """The n decisions of E whole episodes; those of one episode are adjacent, in their order.

    Args:
        episode: int64 [n], 0 to E − 1, rising.
        reward: float64 [n], of each decision.
        log_target: float64 [n], log π of the action under the evaluated policy; −∞ where π is 0.
        log_logged: float64 [n], log μ of the action under the policy that acted.
        predicted: float64 [n], a model's return from this decision on, of the action that was taken.
        expected: float64 [n], that model's return averaged over the actions of the evaluated policy.
        action: int64 [n], the action of a discrete space; None: another space.
        imitated: float64 [n], log probability of the action by an imitation of other episodes; None: unknown.

    Raises:
        ValueError: arrays of different lengths, episodes out of order, or a number that cannot be used.
    """

    episode: NDArray[np.int64]
    reward: Floats
    log_target: Floats
    log_logged: Floats
    predicted: Floats
    expected: Floats
    action: NDArray[np.int64] | None = None
    imitated: Floats | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        lengths = {name: len(array) for name, array in given.items() if array is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"decisions: arrays of different lengths: {lengths}")
        steps = np.diff(self.episode, prepend=-1)
        if len(steps) and (steps[0] != 1 or not np.isin(steps, (0, 1)).all()):
            raise ValueError("decisions: episode must count 0, 1, … without a gap, each in one piece")
        if not np.isfinite(self.log_logged).all() or (self.log_logged > 1e-6).any():
            raise ValueError("decisions: log_logged must be the logarithm of a probability above 0")
        if np.isnan(self.log_target).any() or (self.log_target > 1e-6).any():
            raise ValueError("decisions: log_target must be the logarithm of a probability")
        for name in ("reward", "predicted", "expected"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"decisions: {name} must be finite")

    @property
    def episodes(self) -> int:
        return int(self.episode[-1]) + 1 if len(self.episode) else 0

    def by_step(self) -> NDArray[np.int64]:
        """Return the index of each decision in its own episode, int64 [n], from 0."""
        starts = np.flatnonzero(np.diff(self.episode, prepend=-1))
        lengths = np.diff(np.append(starts, len(self.episode)))
        return np.arange(len(self.episode)) - np.repeat(starts, lengths)


# ---- A model of the return of an action, for the doubly robust estimate: ridge regression for each action.

_RIDGE: Final = 1.0


def returns_from(episode: NDArray[np.int64], reward: Floats, discount: float) -> Floats:
    """Return Σ_k γ^k r_{t+k} of every decision until the end of its episode, float64 [n].

    episode: int64 [n], equal numbers adjacent. reward: float64 [n].
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

    seen: float32 [n, d], observations. action: int64 [n]. returns: float64 [n], from each decision on.
    episode: int64 [n]; the model of even episodes predicts odd ones, and the other way round.
    """
    predicted = np.zeros((len(seen), actions))
    for half in (0, 1):
        fit, use = episode % 2 == half, episode % 2 != half
        if not fit.any() or not use.any():
            continue
        inputs_of = standardised(seen[fit])
        inputs, overall = inputs_of(seen), float(returns[fit].mean())
        for one in range(actions):
            rows = fit & (action == one)
            level, slope = ridge(inputs[rows], returns[rows], overall)
            predicted[use, one] = level + inputs[use] @ slope
    return predicted


def standardised(seen: NDArray[Any]) -> Callable[[NDArray[Any]], Floats]:
    """Return a function that scales numbers [m, d] by mean and deviation of `seen`, to float64 [m, d]."""
    mean, scale = seen.mean(0), seen.std(0) + 1e-6
    return lambda values: np.clip((values - mean) / scale, -10, 10).astype(np.float64)


def ridge(inputs: Floats, wanted: Floats, otherwise: float) -> tuple[float, Floats]:
    """Return the regression's value at 0 and its slope, float64 [d].

    inputs: float64 [n, d]. wanted: float64 [n]. otherwise: the value where n is 0.
    """
    if not len(inputs):
        return otherwise, np.zeros(inputs.shape[1])
    centre, level = inputs.mean(0), wanted.mean()
    inside = inputs - centre
    slope = np.linalg.solve(inside.T @ inside + _RIDGE * np.eye(inside.shape[1]), inside.T @ (wanted - level))
    return float(level - centre @ slope), slope


# ---- An imitation of what acted: multinomial logistic regression of the logged actions.

_STEPS: Final = 300
_RATE: Final = 0.5
_PULL: Final = 1e-3
_LEAST: Final = 1e-3
"""Share of the uniform policy in an imitation, so that no probability is near 0."""
Imitation = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float64]]
"""(observations, float32 [n, d], actions that were taken, int64 [n]) → their probabilities, float64 [n]."""


def imitate(seen: NDArray[np.float32], action: NDArray[np.int64], actions: int) -> Imitation:
    """Return a fit to decisions. seen: float32 [n, d], observations. action: int64 [n], below `actions`."""
    deviations_of = standardised(seen)

    def inputs_of(seen: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.hstack([deviations_of(seen), np.ones((len(seen), 1))])

    inputs, wanted, weights = inputs_of(seen), np.eye(actions)[action], np.zeros((seen.shape[1] + 1, actions))
    # The largest eigenvalue of the inputs bounds the curvature: it gives the largest safe step size.
    rate = _RATE * len(inputs) / max(float(np.linalg.norm(inputs, 2)) ** 2, 1e-12) * 2
    for _ in range(_STEPS):
        gradient = inputs.T @ (_softmax(inputs @ weights) - wanted) / len(inputs) + _PULL * weights
        weights -= rate * gradient

    def estimate(seen: NDArray[np.float32], action: NDArray[np.int64]) -> NDArray[np.float64]:
        chances = _softmax(inputs_of(seen) @ weights)
        taken: Floats = chances[np.arange(len(action)), action]
        return (1 - _LEAST) * taken + _LEAST / actions

    return estimate


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return shares


_MOST_FITTED: Final = 1_000_000
_MOST_STEPPED: Final = 2_000_000
"""Most numbers that an imitation is fitted on, and most of which it sees more than the numbers themselves."""
_PARTS: Final = 8


def imitated(
    seen: NDArray[np.float32], action: NDArray[np.int64], episode: NDArray[np.int64], actions: int
) -> Floats:
    """Return log probabilities of actions, float64 [n], by an imitation of the other half of the episodes.

    It sees each number, and whether it is above each eighth of all. Arguments are those of `cross_fitted`.
    """
    inputs, found = seen, np.full(len(seen), -np.log(actions))
    if seen.size <= _MOST_STEPPED:
        edges = np.quantile(seen, np.linspace(0, 1, _PARTS + 1)[1:-1], axis=0)
        inputs = np.concatenate([seen, *(seen > edge for edge in edges)], 1, dtype=np.float32)
    for half in (0, 1):
        rows, use = np.flatnonzero(episode % 2 == half), episode % 2 != half
        if len(rows) and use.any():
            rows = rows[:: -(-len(rows) * inputs.shape[1] // _MOST_FITTED)]
            found[use] = np.log(imitate(inputs[rows], action[rows], actions)(inputs[use], action[use]))
    return found


_Z: Final = 1.959963984540054
"""Standard deviations within which 95 % of a normal distribution lie."""
_FEW: Final = 5.0
"""Decisions with another reward below which a normal interval is too narrow."""
_LARGEST_LOG: Final = 300.0
"""Larger weights and their squares overflow; one of them makes the effective sample size 1 anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def standard_error(self) -> float:
        """Return the standard error: the interval is the value ± 1.96 of it."""
        return (self.high - self.low) / (2 * _Z)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Estimates of one policy's mean return per episode.

    mean_ratio: of π / μ over all decisions, 1 in expectation where the logged probabilities are true and the
    evaluated policy takes only logged actions. gap: IPS minus doubly robust, 0 in expectation. effective:
    effective sample size in episodes, at the decision where it is smallest.
    """

    ips: Estimate
    self_normalised: Estimate
    doubly_robust: Estimate
    mean_ratio: Estimate
    gap: Estimate
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
        gap=_of(ips - doubly),
        effective=effective,
    )


def _widened(found: Estimate, reward: Floats, effective: float) -> Estimate:
    """Return an estimate of single decisions, with a wider interval near the smallest or largest reward.

    Other rewards are then too rare in the sample for its variance to show them. So the interval is at least
    that of a share with two successes and two failures added (Agresti and Coull 1998).
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


# ---- Whether estimates can be trusted.

LEAST_EFFECTIVE: Final = 50.0
"""Effective sample size, in episodes, below which there is no estimate."""
_MOST_ERRORS: Final = 4.0
"""Standard errors by which the mean ratio may differ from 1, and the gap from 0."""
_MOST_GAIN: Final = 14.0
"""Logarithm of a million."""
_LEAST_GAIN: Final = 0.01
"""Mean gain by which rounded propensities are no reason to refuse a large log."""


class TooLittle(Exception):
    """The log does not suffice for an estimate; the text says why, and what would."""


def judge(decisions: Decisions, discount: float) -> Estimates:
    """Return estimates that can be trusted; raises TooLittle where there are none.

    decisions: of whole episodes. discount: γ, from 0 to 1.
    """
    count = decisions.episodes
    if count < LEAST_EFFECTIVE:
        raise TooLittle(
            f"{count} episodes with known propensities, fewer than {LEAST_EFFECTIVE:.0f}: log more of them"
        )
    _check_propensities(decisions)
    _check_imitation(decisions)
    found = estimate(decisions, discount)
    if found.effective < LEAST_EFFECTIVE:
        raise TooLittle(
            f"effective sample size {found.effective:.1f} of {count} episodes, below {LEAST_EFFECTIVE:.0f}: "
            "the policy rarely does what was logged; log more, or judge a policy that is closer to the "
            "logging one"
        )
    if _is_off(found.mean_ratio, 1):
        raise TooLittle(
            f"π / μ has a mean of {found.mean_ratio.value:.3f} ± "
            f"{found.mean_ratio.standard_error:.3f} instead of 1: the propensities do not belong to the "
            "actions, or the policy does what was never tried"
        )
    if _is_off(found.gap, 0):
        raise TooLittle(
            f"importance sampling ({found.ips.value:.3f}) and the doubly robust estimate "
            f"({found.doubly_robust.value:.3f}) exclude each other: the propensities do not "
            "belong to the actions"
        )
    return found


def _check_propensities(decisions: Decisions) -> None:
    """Check the log itself: 1{a was done} / μ(a) has a mean of 1, or less where a is not always possible.

    This finds propensities that were joined by the wrong key, whatever policy is evaluated: the mean of π / μ
    may be 1 in spite of them.
    """
    if decisions.action is None:
        return
    for action in np.unique(decisions.action):
        inverse = np.exp(np.minimum(-decisions.log_logged, _LARGEST_LOG))
        ratio = np.where(decisions.action == action, inverse, 0.0)
        error = float(ratio.std(ddof=1)) / np.sqrt(len(ratio))
        above = float(ratio.mean()) - 1
        if above > max(_MOST_ERRORS * error, 1e-6):
            raise TooLittle(
                f"the propensities do not belong to the actions: action {action} is {above + 1:.2f} times "
                f"(± {error:.2f}) as frequent as they allow; were they joined by the right key?"
            )


def _check_imitation(decisions: Decisions) -> None:
    """Check that an imitation of the log does not explain the actions better than the propensities do.

    Were these true, the product of the ratios over half of the episodes, which the imitation has not seen,
    would reach 1 / p with probability p at most (Ville 1939).
    """
    if decisions.imitated is None:
        return
    gain = decisions.imitated - decisions.log_logged
    most = max(float(gain[decisions.episode % 2 == half].sum()) for half in (0, 1))
    if most > _MOST_GAIN and gain.mean() > _LEAST_GAIN:
        raise TooLittle(
            "the propensities do not belong to the actions: an imitation of other episodes gives each action "
            f"{np.exp(gain.mean()):.2f} times its propensity; log the probability with which it was drawn, "
            "and none where it was not drawn"
        )


def _is_off(mean: Estimate, expected: float) -> bool:
    return abs(mean.value - expected) > max(_MOST_ERRORS * mean.standard_error, 1e-6)
