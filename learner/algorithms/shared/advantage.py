"""Advantages and value targets of unrolls, once per batch with the current critic; pure functions.

Axes: T steps, B columns. All float tensors share a dtype. `values` are V(o_t) of the step itself;
`next_values` are what follows it: 0 where the episode terminated, V(true final observation) where it
was truncated, V(o_{t+1}) otherwise. `carries[t]` is True where step t+1 of the same column continues
the episode of step t inside this batch, so that traces run through; steps that are not valid neither
carry nor are carried into, and their results are 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Advantages:
    """advantage: [T, B], not importance-weighted.   target: [T, B], of the value function."""

    advantage: Tensor
    target: Tensor


class Unrolls(NamedTuple):
    """What both estimators take first, in their order: [T, B] each."""

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

    discount: γ, of all steps or of each, [T, B].

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
    """x_t = terms_t + weights_t x_{t+1}, newest first."""
    result = terms.clone()
    rows, factors = result.unbind(0), weights.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(factors[t], rows[t + 1])
    return result
