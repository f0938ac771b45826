"""The mathematics of an update: schedules, advantages and value targets, losses, and metrics of them.

Pure functions, by section. Three policies: μ that acted, π_prox at the start of this batch, π_θ being
trained. Probabilities are in log space; advantages and targets carry no gradient.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# ---- Learning rate, clip range and entropy coefficient over a run.

Schedule = Literal["constant", "linear", "cosine"]

_STEERING = 1.5
_TOLERANCE = 2.0
_ERROR_BOUND = 0.2
_FIXED = ("value_coefficient", "dual_clip", "value_clip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective of an update and its step size: policy loss + c_v · value loss − c_e · entropy.

    learning_rate: step size. value_coefficient, entropy_coefficient: c_v and c_e. clip_range: ε of
    `policy_loss`; None: `policy_gradient`, which clips nothing. dual_clip, value_clip: of `policy_loss` and
    `value_loss`.
    """

    learning_rate: float
    entropy_coefficient: float
    value_coefficient: float
    clip_range: float | None = None
    dual_clip: float | None = None
    value_clip: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the numbers that are scheduled, by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None and name not in _FIXED}


def factor(schedule: Schedule, progress: float) -> float:
    """Return the factor of the initial value at `progress`, 0..1: from 1, linear and cosine to 0."""
    done = min(max(progress, 0.0), 1.0)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))


def warmup(updates: int, warmup_updates: int) -> float:
    """Return a factor that rises to 1 over the first `warmup_updates`, after `updates`."""
    return min(1.0, (updates + 1) / warmup_updates) if warmup_updates else 1.0


def decayed(initial: float, decay: float, floor: float, updates: int) -> float:
    """Return initial · decay^updates, never below `floor`; without decay (1) it stays the initial value.

    An initial value below the floor is not raised to it: 0 stays 0, and a negative one decays to 0.
    """
    return initial if decay == 1.0 else max(min(floor, initial), initial * decay**updates)


def steered(rate: float, divergence: float, target: float, bounds: tuple[float, float]) -> float:
    """Return the next learning rate after an update that moved the policy by `divergence`, in nats.

    It is divided by 1.5 where that is more than twice the target, and multiplied by 1.5 where it is less than
    half of it, within `bounds`: the rule of Schulman et al. 2017, section 4, for their penalty.
    """
    if divergence > _TOLERANCE * target:
        rate /= _STEERING
    elif divergence < target / _TOLERANCE:
        rate *= _STEERING
    return min(max(rate, bounds[0]), bounds[1])


def adapted(coefficient: float, divergence: float, target: float, count: int, horizon: float) -> float:
    """Return the next weight of a penalty on a divergence (Ziegler et al. 2019, section 2.2).

    β ← β (1 + clip(KL/target − 1, −0.2, 0.2) · n/horizon), n = `count` episodes since the last adaptation.
    """
    error = min(max(divergence / target - 1.0, -_ERROR_BOUND), _ERROR_BOUND)
    return coefficient * max(0.0, 1.0 + error * count / horizon)


# ---- Advantages and value targets of unrolls, once per batch with the current critic.
#
# Axes: T steps, B columns. All float tensors share a dtype. `values` are V(o_t) of the step itself;
# `next_values` are what follows it: 0 where the episode terminated, V(true final observation) where it
# was truncated, V(o_{t+1}) otherwise. `carries[t]` is True where step t+1 of the same column continues
# the episode of step t inside this batch, so that traces run through; steps that are not valid neither
# carry nor are carried into, and their results are 0.


@dataclass(frozen=True, slots=True)
class Advantages:
    """advantage: [T, B], not importance-weighted.   target: [T, B], of the value function."""

    advantage: Tensor
    target: Tensor


class Unrolls(NamedTuple):
    """The first arguments of both estimators, in their order: [T, B] each."""

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    carries: Tensor
    valid: Tensor


def carries(terminated: Tensor, truncated: Tensor, valid: Tensor) -> Tensor:
    """Return where a trace runs from step t into t+1; bool [T, B] each, the last row is False."""
    result = torch.zeros_like(valid)
    result[:-1] = valid[:-1] & valid[1:] & ~(terminated | truncated)[:-1]
    return result


def next_values(
    observed: Tensor,
    terminated: Tensor,
    final_slot: Tensor,
    final_step: Tensor,
    final_values: Tensor,
) -> Tensor:
    """Return the value that follows each step, [T, B].

    observed: [T+1, B], V of every observation.   terminated: bool [T, B].
    final_slot, final_step: int64 [K]; final_values: [K], V of the true last observation of each.
    """
    following = observed[1:].clone()
    following[final_step, final_slot] = final_values
    return following.masked_fill(terminated, 0.0)


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    carries: Tensor,
    valid: Tensor,
    *,
    discount: float | Tensor,
    gae_lambda: float,
) -> Advantages:
    """Estimate advantages and targets by generalised estimation (Schulman et al. 2016, eq. 16); all [T, B].

    discount: γ, one number or one per step, [T, B].

    δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1} where the trace carries;  target = A_t + V_t.
    """
    delta = (rewards + discount * next_values - values).masked_fill(~valid, 0.0)
    # A bool times a Python float would be float32 whatever the values are.
    advantage = _backwards(delta, carries.to(values.dtype) * (discount * gae_lambda))
    return Advantages(advantage, (advantage + values).masked_fill(~valid, 0.0))


def vtrace(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    carries: Tensor,
    valid: Tensor,
    log_ratios: Tensor,
    *,
    discount: float,
    gae_lambda: float,
    rho_clip: float,
    c_clip: float,
) -> Advantages:
    """Estimate advantages and targets by V-trace (Espeholt et al. 2018, eq. 1), with λ; all [T, B].

    ρ_t = min(ρ̄, π/μ), c_t = λ min(c̄, π/μ), log π/μ = `log_ratios`;
    v_t − V_t = ρ_t (r_t + γ V_{t+1} − V_t) + γ c_t (v_{t+1} − V_{t+1}) where the trace carries;
    target = v_t.  The advantage is r_t + γ v_{t+1} − V_t *without* ρ_t: the surrogates that use it carry
    π/μ themselves, and weighting twice would bias them.

    On policy the targets are GAE's with the same λ, and the advantage is GAE's only at λ = 1: it is
    δ_t + (A_gae,t − δ_t)/λ, since λ shortens the trace of v_{t+1} and not the step to it.
    """
    ratios = log_ratios.exp()
    delta = ratios.clamp(max=rho_clip) * (rewards + discount * next_values - values)
    correction = _backwards(
        delta.masked_fill(~valid, 0.0), (discount * gae_lambda) * ratios.clamp(max=c_clip) * carries
    )
    following = next_values.clone()
    following[:-1] += correction[1:] * carries[:-1]
    advantage = rewards + discount * following - values
    target = (values + correction).masked_fill(~valid, 0.0)
    return Advantages(advantage.masked_fill(~valid, 0.0), target)


def _backwards(terms: Tensor, weights: Tensor) -> Tensor:
    """Return x_t = terms_t + weights_t x_{t+1}, computed from the last step."""
    result = terms.clone()
    rows, factors = result.unbind(0), weights.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(factors[t], rows[t + 1])
    return result


def standardise(advantage: Tensor) -> Tensor:
    """Shift and scale advantages [n] to mean 0 and standard deviation 1; a single step becomes 0."""
    if len(advantage) < 2:
        return advantage - advantage.mean()
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


# ---- Anchors and weights, fixed over the epochs of a batch; flat, valid steps [n] from here on.


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The surrogate objective of a batch, fixed over its epochs.

    anchor: log-probabilities [n] that π_θ is clipped around.
    weighted_advantage: [n], the advantage times the behaviour weight.
    """

    anchor: Tensor
    weighted_advantage: Tensor


def coupled(behaviour: Tensor, advantage: Tensor) -> Surrogate:
    """Anchor PPO at the policy that acted, μ (Schulman et al. 2017, eq. 7). behaviour: log μ, [n]."""
    return Surrogate(behaviour, advantage)


def decoupled(behaviour: Tensor, proximal: Tensor, advantage: Tensor, weight_cap: float) -> Surrogate:
    """Anchor PPO at π_prox with experience of μ (Hilton, Cobbe, Schulman 2021, eq. 2).

    behaviour, proximal: log μ and log π_prox, [n]. advantage: [n].

    L = −E[ (π_prox/μ) min(r A, clip(r, 1−ε, 1+ε) A) ], r = π_θ/π_prox. The weight π_prox/μ is positive and
    fixed for the batch, so it joins the advantage; it is truncated at `weight_cap`.
    With π_prox = μ this is `coupled`; without the clip it is the policy gradient of V-trace, ρ A with
    ρ = min(ρ̄, π/μ) (Espeholt et al. 2018, section 4.2).
    """
    return Surrogate(proximal, behaviour_weight(behaviour, proximal, weight_cap) * advantage)


def behaviour_weight(behaviour: Tensor, proximal: Tensor, cap: float) -> Tensor:
    """Return min(π_prox/μ, cap), [n]; behaviour, proximal: log μ and log π_prox, [n]."""
    return (proximal - behaviour).exp().clamp(max=cap)


# ---- Losses of policy and value. total: rows that a mean is over, where these are one rank's or one
# micro-batch's share of them; None: these.


def policy_gradient(log_prob: Tensor, weighted_advantage: Tensor, total: int | None = None) -> Tensor:
    """Return −mean w A log π_θ (Williams 1992, eq. 11; Espeholt et al. 2018, section 4.2); [n] each."""
    return (log_prob * weighted_advantage).sum() / -(len(log_prob) if total is None else total)


def policy_loss(
    log_prob: Tensor,
    anchor: Tensor,
    weighted_advantage: Tensor,
    clip_range: float,
    dual_clip: float | None = None,
    total: int | None = None,
) -> Tensor:
    """Return −mean min(r A, clip(r, 1−ε, 1+ε) A), r = π_θ/π_anchor (Schulman et al. 2017, eq. 7).

    log_prob, anchor: log π_θ and log π_anchor, [n]. weighted_advantage: [n]. clip_range: ε.
    With `dual_clip` c > 1 the smaller one is held above c A where A < 0 (Ye et al. 2020, eq. 5), so that an
    action that became very likely since does not push without limit.
    """
    ratio = (log_prob - anchor).exp()
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range) * weighted_advantage
    smaller = torch.minimum(ratio * weighted_advantage, clipped)
    if dual_clip is not None:
        smaller = torch.maximum(smaller, weighted_advantage.clamp(max=0.0) * dual_clip)
    return smaller.sum() / -(len(log_prob) if total is None else total)


def value_loss(
    value: Tensor, target: Tensor, old_value: Tensor, clip: float | None, total: int | None = None
) -> Tensor:
    """Return half the mean squared error; value, target, old_value: [n].

    With `clip` the larger of that and the error of the value held within ± clip of `old_value`, as in
    the code published with Schulman et al. 2017.
    """
    error = functional.mse_loss(value, target, reduction="none")
    if clip is not None:
        held = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, functional.mse_loss(held, target, reduction="none"))
    return error.sum() * (0.5 / (len(value) if total is None else total))


# ---- Metrics.

_MOST_REPORTED = 60.0
"""Log-ratios above this are reported as this: the exponential of 88.8 leaves the range of float32."""


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """Estimate KL(before ‖ after) as the mean of r − 1 − log r ≥ 0, a scalar.

    before, after: log-probabilities [n] of actions drawn by `before`.
    """
    log_ratio = after - before
    return (log_ratio.clamp(max=_MOST_REPORTED).exp() - 1.0 - log_ratio).mean()


def clip_fraction(log_prob: Tensor, anchor: Tensor, clip_range: float) -> Tensor:
    """Return the share of steps whose ratio to the anchor lies outside 1 ± ε, a scalar."""
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
    return (log_prob - behaviour).max().clamp(max=_MOST_REPORTED).exp()


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Return 1 − var(target − value)/var(target), a scalar; 0 where the targets [n] are all alike."""
    # In float64, since squares of large targets leave the range of float32.
    wide = target.double()
    variance = wide.var(correction=0)
    explained = 1.0 - (wide - value).var(correction=0) / variance.clamp(min=1e-12)
    return torch.where(variance > 1e-12, explained, 0.0).to(value.dtype)
