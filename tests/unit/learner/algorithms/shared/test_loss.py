"""The surrogates against brute force, and their identities."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.learner.algorithms import losses as loss

CLIP, CAP, COUNT = 0.2, 5.0, 400


def log_probs(seed: int, spread: float, base: Tensor | None = None) -> Tensor:
    """Log-probabilities [n] around `base`."""
    noise = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (torch.full((COUNT,), -1.0, dtype=torch.float64) if base is None else base) + spread * noise


def advantages() -> Tensor:
    """Advantages [n]."""
    return log_probs(9, 1.0) + 1.0


def surrogate_loss(current: Tensor, fixed: loss.Surrogate) -> Tensor:
    """The loss that an epoch minimises."""
    return loss.policy_loss(current, fixed.anchor, fixed.weighted_advantage, CLIP)


def slope(of: Callable[[Tensor], Tensor], where: Tensor) -> Tensor:
    """∂of/∂where, [n]."""
    leaf = where.clone().requires_grad_()
    return torch.autograd.grad(of(leaf), leaf)[0]


def gradient(current: Tensor, fixed: loss.Surrogate) -> Tensor:
    """∂loss/∂log π_θ, [n]."""
    return slope(lambda leaf: surrogate_loss(leaf, fixed), current)


def brute_force(behaviour: Tensor, proximal: Tensor, current: Tensor, advantage: Tensor) -> Tensor:
    """−(π_prox/μ) ∂min(rA, clip(r)A)/∂log π_θ / n, step by step in probabilities."""
    result = []
    for mu, prox, now, a in zip(
        behaviour.tolist(), proximal.tolist(), current.tolist(), advantage.tolist(), strict=True
    ):
        weight = min(math.exp(prox) / math.exp(mu), CAP)
        ratio = math.exp(now) / math.exp(prox)
        outward = (a > 0 and ratio > 1 + CLIP) or (a < 0 and ratio < 1 - CLIP)
        result.append(0.0 if outward else -weight * ratio * a / COUNT)
    return torch.tensor(result, dtype=torch.float64)


def test_decoupled_gradient_at_a_fixed_lag_is_its_brute_force_formula() -> None:
    behaviour = log_probs(1, 0.0)
    proximal = log_probs(2, 0.4, behaviour)
    current = log_probs(3, 0.15, proximal)
    fixed = loss.decoupled(behaviour, proximal, advantages(), CAP)
    result = gradient(current, fixed)
    torch.testing.assert_close(
        result, brute_force(behaviour, proximal, current, advantages()), rtol=1e-9, atol=0
    )
    other = gradient(current, loss.coupled(behaviour, advantages()))
    assert (result - other).abs().max() > 0.1 * result.abs().max()


def test_decoupled_is_coupled_when_the_proximal_policy_acted() -> None:
    behaviour = log_probs(1, 0.3)
    current = log_probs(3, 0.2, behaviour)
    first = loss.decoupled(behaviour, behaviour, advantages(), CAP)
    second = loss.coupled(behaviour, advantages())
    assert torch.equal(surrogate_loss(current, first), surrogate_loss(current, second))
    assert torch.equal(gradient(current, first), gradient(current, second))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
def test_both_branches_have_the_slope_of_finite_differences(sign: float, ratio: float) -> None:
    anchor = torch.tensor([-1.0], dtype=torch.float64)
    fixed = loss.Surrogate(anchor, torch.tensor([sign], dtype=torch.float64))
    current = anchor + math.log(ratio)
    step = 1e-6
    found = (surrogate_loss(current + step, fixed) - surrogate_loss(current - step, fixed)) / (2 * step)
    torch.testing.assert_close(gradient(current, fixed), found.reshape(1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 2.5, 3.5, 20.0])
def test_dual_clip_is_the_formula_of_its_paper(sign: float, ratio: float) -> None:
    anchor = torch.tensor([-1.0], dtype=torch.float64)
    advantage = torch.tensor([sign], dtype=torch.float64)
    current, step = anchor + math.log(ratio), 1e-6

    def of(log_prob: Tensor) -> Tensor:
        return loss.policy_loss(log_prob, anchor, advantage, CLIP, dual_clip=3.0)

    expected = min(ratio * sign, min(max(ratio, 1 - CLIP), 1 + CLIP) * sign)
    expected = max(expected, 3.0 * sign) if sign < 0 else expected
    assert of(current).item() == pytest.approx(-expected)
    found = (of(current + step) - of(current - step)) / (2 * step)
    torch.testing.assert_close(slope(of, current), found.reshape(1), rtol=1e-6, atol=1e-9)


def test_dual_clip_changes_bad_actions_beyond_it_and_nothing_else() -> None:
    anchor = log_probs(1, 0.0)
    current = log_probs(2, 1.0, anchor)
    advantage = advantages()
    plain = slope(lambda leaf: loss.policy_loss(leaf, anchor, advantage, CLIP), current)
    held = slope(lambda leaf: loss.policy_loss(leaf, anchor, advantage, CLIP, dual_clip=1.5), current)
    beyond = (advantage < 0) & ((current - anchor).exp() > 1.5)
    assert 0 < beyond.sum() < COUNT
    assert torch.equal(plain != held, beyond)
    assert not held[beyond].any()


def test_the_policy_gradient_is_its_formula() -> None:
    current, weights = log_probs(1, 0.5), advantages()
    found = loss.policy_gradient(current, weights)
    torch.testing.assert_close(found, -(weights * current).mean(), rtol=1e-12, atol=0)


def test_weights_of_impala_are_truncated_ratios() -> None:
    behaviour = log_probs(1, 0.3)
    proximal = log_probs(2, 0.5, behaviour)
    fixed = loss.decoupled(behaviour, proximal, advantages(), 1.2)
    ratio = torch.minimum(proximal.exp() / behaviour.exp(), torch.tensor(1.2, dtype=torch.float64))
    torch.testing.assert_close(fixed.weighted_advantage, ratio * advantages(), rtol=1e-9, atol=0)
    assert torch.equal(fixed.anchor, proximal)


def test_behaviour_weight_is_truncated() -> None:
    weight = loss.behaviour_weight(torch.tensor([-9.0, -1.0]), torch.tensor([-1.0, -1.5]), 2.0)
    torch.testing.assert_close(weight, torch.tensor([2.0, math.exp(-0.5)]))


def test_value_loss_takes_the_larger_error_when_clipped() -> None:
    value, target, old = torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([1.0])
    assert loss.value_loss(value, target, old, None).item() == pytest.approx(0.5)
    assert loss.value_loss(value, target, old, 0.5).item() == pytest.approx(0.5 * 2.5**2)


def test_standardised_advantages_have_mean_zero_and_deviation_one() -> None:
    result = loss.standardise(3.0 + 5.0 * advantages())
    assert result.mean().abs() < 1e-9
    assert result.std().item() == pytest.approx(1.0)
    assert loss.standardise(torch.tensor([7.0])).tolist() == [0.0]


def test_diagnostics_on_policy() -> None:
    same = log_probs(1, 0.5)
    assert loss.divergence(same, same).item() == 0.0
    assert loss.clip_fraction(same, same, CLIP).item() == 0.0
    assert loss.effective_sample_size(same, same).item() == pytest.approx(1.0)


def test_divergence_estimates_the_kl_of_a_known_pair() -> None:
    p, q = 0.6, 0.45
    heads = torch.from_numpy(np.random.default_rng(0).random(200_000) < p)
    before = torch.where(heads, math.log(p), math.log(1 - p))
    after = torch.where(heads, math.log(q), math.log(1 - q))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert loss.divergence(before, after).item() == pytest.approx(expected, rel=0.03)


def test_explained_variance() -> None:
    target = torch.tensor([1.0, 2.0, 3.0])
    assert loss.explained_variance(target, target).item() == 1.0
    assert loss.explained_variance(torch.zeros(3), target).item() == pytest.approx(0.0)
    assert loss.explained_variance(torch.zeros(3), torch.ones(3)).item() == 0.0


def test_rounding_does_not_stop_the_critic() -> None:
    generator = torch.Generator().manual_seed(0)
    value, old = (torch.randn(4096, generator=generator) * 0.01 for _ in range(2))
    target = torch.randn(4096, generator=generator)
    clipped = slope(lambda leaf: loss.value_loss(leaf, target, old, 1.0), value)
    plain = slope(lambda leaf: loss.value_loss(leaf, target, old, None), value)
    assert bool((((old + (value - old)) - target).square() > (value - target).square()).any())
    torch.testing.assert_close(clipped, plain, rtol=1e-5, atol=1e-9)


def test_shares_of_a_minibatch_add_up_to_it() -> None:
    value, target, old = (log_probs(seed, 1.0) for seed in (1, 2, 3))
    parts = [slice(0, 3), slice(3, 3), slice(3, None)]
    whole = (loss.policy_loss(value, old, target, CLIP), loss.value_loss(value, target, old, CLIP))
    shared = [
        (
            loss.policy_loss(value[part], old[part], target[part], CLIP, total=len(value)),
            loss.value_loss(value[part], target[part], old[part], CLIP, len(value)),
        )
        for part in parts
    ]
    for kind, expected in enumerate(whole):
        torch.testing.assert_close(sum(part[kind] for part in shared), expected)
