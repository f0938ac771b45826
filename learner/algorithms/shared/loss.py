"""Losses of policy and value, and what to watch of them; pure functions of flat, valid steps [n].

Three policies: μ that acted, π_prox at the start of this batch, π_θ being trained. Everything is in
log space; advantages and targets carry no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.policy.distributions import Numbers, names_of

_MOST_TOLD = 60.0
"""Log-ratios above this are told as this: the exponential of 88.8 leaves the range of float32."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What stays fixed over the epochs of a batch.

    anchor: log-probabilities [n] that π_θ is clipped around.
    weighted_advantage: [n], the advantage times the behaviour weight.
    """

    anchor: Tensor
    weighted_advantage: Tensor


def weighted(behaviour: Tensor, proximal: Tensor, advantage: Tensor, rho_clip: float) -> Surrogate:
    """Weight advantages as the policy gradient of V-trace: ρ A, ρ = min(ρ̄, π/μ).

    behaviour, proximal: log μ and log π_prox, [n]. advantage: [n]. rho_clip: ρ̄. Espeholt et al. 2018,
    section 4.2.
    """
    return Surrogate(proximal, behaviour_weight(behaviour, proximal, rho_clip) * advantage)


def coupled(behaviour: Tensor, advantage: Tensor) -> Surrogate:
    """Anchor PPO at the policy that acted (Schulman et al. 2017, eq. 7): anchor μ, weight 1.

    behaviour: log μ, [n]. advantage: [n].
    """
    return Surrogate(behaviour, advantage)


def decoupled(behaviour: Tensor, proximal: Tensor, advantage: Tensor, weight_cap: float) -> Surrogate:
    """Anchor PPO at π_prox with experience of μ (Hilton, Cobbe, Schulman 2021, eq. 2).

    behaviour, proximal: log μ and log π_prox, [n]. advantage: [n].

    L = −E[ (π_prox/μ) min(r A, clip(r, 1−ε, 1+ε) A) ], r = π_θ/π_prox. The weight π_prox/μ is positive and
    fixed for the batch, so it joins the advantage; it is truncated at `weight_cap`.
    With π_prox = μ this is `coupled`.
    """
    return Surrogate(proximal, behaviour_weight(behaviour, proximal, weight_cap) * advantage)


def behaviour_weight(behaviour: Tensor, proximal: Tensor, cap: float) -> Tensor:
    """Return min(π_prox/μ, cap), [n]; behaviour, proximal: log μ and log π_prox, [n]."""
    return (proximal - behaviour).exp().clamp(max=cap)


@dataclass(frozen=True, slots=True)
class Sloped:
    """A loss and its derivative, in closed form: a quarter of the time that autograd takes for them.

    loss: scalar.   slope: [n], by each element of the first argument. Arrays where the arguments are.
    """

    loss: Numbers
    slope: Numbers


def policy_gradient(log_prob: Numbers, weighted_advantage: Numbers, total: int | None = None) -> Sloped:
    """Return −mean w A log π_θ, and its slope by log π_θ.

    Williams 1992, eq. 11; Espeholt et al. 2018, section 4.2. log_prob, weighted_advantage: [n].
    total: rows that the mean is over, where these are one rank's share of them; None: these.
    """
    count = len(log_prob) if total is None else total
    loss = (log_prob * weighted_advantage).sum() / -count
    return Sloped(loss, weighted_advantage * (-1.0 / count))


def policy_loss(
    log_prob: Numbers,
    anchor: Numbers,
    weighted_advantage: Numbers,
    clip_range: float,
    dual_clip: float | None = None,
    total: int | None = None,
) -> Sloped:
    """Return −mean min(r A, clip(r, 1−ε, 1+ε) A), r = π_θ/π_anchor, and its slope by log π_θ.

    log_prob, anchor: log π_θ and log π_anchor, [n]. weighted_advantage: [n]. clip_range: ε. total: as in
    `policy_gradient`.
    ∂(r A)/∂log π_θ = r A where the first is the smaller; where it is not, the clipped one is constant.
    With `dual_clip` c > 1 the smaller one is held above c A where A < 0 (Ye et al. 2020, eq. 5), so that an
    action that became very likely since does not push without limit.
    """
    names = names_of(log_prob)
    ratio = names.exp(log_prob - anchor)
    clipped = ratio.clip(1.0 - clip_range, 1.0 + clip_range) * weighted_advantage
    unclipped = ratio * weighted_advantage
    smaller = names.minimum(unclipped, clipped)
    count = len(log_prob) if total is None else total
    slope = (unclipped <= clipped) * unclipped
    if dual_clip is not None:
        floor = weighted_advantage.clip(max=0.0) * dual_clip
        slope *= smaller >= floor
        smaller = names.maximum(smaller, floor)
    slope *= -1.0 / count
    return Sloped(smaller.sum() / -count, slope)


def value_loss(
    value: Numbers, target: Numbers, old_value: Numbers, clip: float | None, total: int | None = None
) -> Sloped:
    """Return half the mean squared error, and its slope by the value.

    value, target, old_value: [n]. total: as in `policy_gradient`.

    With `clip` the larger of that and the error of the value held within ± clip of `old_value`, as in
    the code published with Schulman et al. 2017; where that is the larger and is held, it is constant.
    """
    difference = value - target
    error = difference * difference
    count = len(value) if total is None else total
    slope = difference * (1.0 / count)
    if clip is not None:
        moved = value - old_value
        held = old_value + moved.clip(-clip, clip) - target
        held_error = held * held
        # Within ± clip both errors are one, but for rounding, which must not decide.
        slope *= (error >= held_error) | (abs(moved) <= clip)
        error = names_of(value).maximum(error, held_error)
    return Sloped(error.sum() * (0.5 / count), slope)


def standardise(advantage: Tensor) -> Tensor:
    """Shift and scale advantages [n] to mean 0 and standard deviation 1; a single step becomes 0."""
    if len(advantage) < 2:
        return advantage - advantage.mean()
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """Estimate KL(before ‖ after) as the mean of r − 1 − log r ≥ 0, a scalar.

    before, after: log-probabilities [n] of actions drawn by `before`.
    """
    log_ratio = after - before
    return (log_ratio.clamp(max=_MOST_TOLD).exp() - 1.0 - log_ratio).mean()


def clip_fraction(log_prob: Tensor, anchor: Tensor, clip_range: float) -> Tensor:
    """Return the share of steps whose ratio to the anchor lies outside 1 ± ε, a scalar.

    log_prob, anchor: [n]. clip_range: ε.
    """
    return (((log_prob - anchor).exp() - 1.0).abs() > clip_range).to(log_prob.dtype).mean()


def effective_sample_size(behaviour: Tensor, log_prob: Tensor) -> Tensor:
    """Return (Σw)² / (n Σw²), w = π/μ: 1 on policy, 1/n when one step has all the weight.

    behaviour, log_prob: log μ and log π, [n].
    """
    log_weight = log_prob - behaviour
    log_size = 2.0 * log_weight.logsumexp(0) - (2.0 * log_weight).logsumexp(0)
    return log_size.exp() / len(log_weight)


def largest_ratio(behaviour: Tensor, log_prob: Tensor) -> Tensor:
    """Return the largest π/μ, at most e^60: metrics are float32. behaviour, log_prob: log μ, log π, [n]."""
    return (log_prob - behaviour).max().clamp(max=_MOST_TOLD).exp()


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Return 1 − var(target − value)/var(target), a scalar; 0 where the targets are all alike.

    value, target: [n].
    """
    # In float64, since squares of large targets leave the range of float32.
    wide = target.double()
    variance = wide.var(correction=0)
    explained = 1.0 - (wide - value).var(correction=0) / variance.clamp(min=1e-12)
    return torch.where(variance > 1e-12, explained, 0.0).to(value.dtype)
