"""GAE and V-trace against loops that sum over pairs of steps, and the identities between them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.learner.algorithms.losses import Advantages, carries, gae, next_values, vtrace

DISCOUNT, GAE_LAMBDA, RHO, C = 0.97, 0.9, 1.0, 0.8


@dataclass
class Case:
    """Random unrolls with ended episodes, final values and steps that are no experience."""

    rewards: Tensor
    observed: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    final_slot: Tensor
    final_step: Tensor
    finals: Tensor
    log_ratios: Tensor

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What both estimators take."""
        following = next_values(
            self.observed.to(dtype), self.terminated, self.final_slot, self.final_step, self.finals.to(dtype)
        )
        carried = carries(self.terminated, self.truncated, self.valid)
        return self.rewards.to(dtype), self.observed[:-1].to(dtype), following, carried, self.valid


def case(seed: int, steps: int = 23, columns: int = 7) -> Case:
    """Some steps terminate, some truncate, the step after an end is sometimes an autoreset step."""
    random = np.random.default_rng(seed)
    ends = random.random((steps, columns)) < 0.15
    terminated = ends & (random.random(ends.shape) < 0.5)
    valid = np.ones_like(ends)
    valid[1:] = ~(ends[:-1] & (random.random((steps - 1, columns)) < 0.5))
    valid[steps - 4 :, 0] = False
    terminated, truncated = terminated & valid, ends & ~terminated & valid
    step, slot = (terminated | truncated).nonzero()
    return Case(
        rewards=torch.from_numpy(random.standard_normal((steps, columns))),
        observed=torch.from_numpy(random.standard_normal((steps + 1, columns))),
        terminated=torch.from_numpy(terminated),
        truncated=torch.from_numpy(truncated),
        valid=torch.from_numpy(valid),
        final_slot=torch.from_numpy(slot),
        final_step=torch.from_numpy(step),
        finals=torch.from_numpy(random.standard_normal(len(step))),
        log_ratios=torch.from_numpy(0.5 * random.standard_normal((steps, columns))),
    )


def follows(case: Case, t: int, b: int) -> float:
    """V of what follows a step, looked up one by one."""
    if case.terminated[t, b]:
        return 0.0
    for slot, step, value in zip(case.final_slot, case.final_step, case.finals, strict=True):
        if (int(slot), int(step)) == (b, t):
            return float(value)
    return float(case.observed[t + 1, b])


def runs_on(case: Case, t: int, b: int) -> bool:
    """Whether step t + 1 continues the episode of step t in this batch."""
    if t + 1 >= len(case.rewards) or case.terminated[t, b] or case.truncated[t, b]:
        return False
    return bool(case.valid[t + 1, b])


def summed(case: Case, *, vtrace: bool) -> tuple[Any, Any]:
    """Advantage and target of every step as a sum over all later steps of its episode: O(T²)."""
    steps, columns = case.rewards.shape
    advantage, target = np.zeros((steps, columns)), np.zeros((steps, columns))
    correction = np.zeros((steps + 1, columns))
    ratio = np.exp(case.log_ratios.numpy()) if vtrace else np.ones((steps, columns))
    for b in range(columns):
        for t in range(steps):
            if not case.valid[t, b]:
                continue
            weight, k = 1.0, t
            while True:
                value = float(case.observed[k, b])
                delta = float(case.rewards[k, b]) + DISCOUNT * follows(case, k, b) - value
                correction[t, b] += weight * min(RHO, ratio[k, b]) * delta if vtrace else weight * delta
                if not runs_on(case, k, b):
                    break
                weight *= DISCOUNT * GAE_LAMBDA * (min(C, ratio[k, b]) if vtrace else 1.0)
                k += 1
            target[t, b] = float(case.observed[t, b]) + correction[t, b]
    for b in range(columns):
        for t in range(steps):
            if case.valid[t, b]:
                later = follows(case, t, b) + (correction[t + 1, b] if runs_on(case, t, b) else 0.0)
                one_step = float(case.rewards[t, b]) + DISCOUNT * later - float(case.observed[t, b])
                advantage[t, b] = one_step if vtrace else correction[t, b]
    return advantage, target


def estimate(case: Case, *, vtrace_: bool, dtype: torch.dtype = torch.float64) -> Advantages:
    """The estimators under test."""
    if not vtrace_:
        return gae(*case.tensors(dtype), discount=DISCOUNT, gae_lambda=GAE_LAMBDA)
    ratios = case.log_ratios.to(dtype)
    return vtrace(
        *case.tensors(dtype), ratios, discount=DISCOUNT, gae_lambda=GAE_LAMBDA, rho_clip=RHO, c_clip=C
    )


@pytest.mark.parametrize("vtrace_", [False, True], ids=["gae", "vtrace"])
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_sum_over_later_steps(seed: int, *, vtrace_: bool) -> None:
    check_sums(seed, vtrace_=vtrace_)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("vtrace_", [False, True], ids=["gae", "vtrace"])
def test_a_thousand_unrolls_equal_the_sum_over_later_steps(*, vtrace_: bool) -> None:
    for seed in range(5, 150):
        check_sums(seed, vtrace_=vtrace_)


def check_sums(seed: int, *, vtrace_: bool) -> None:
    """One batch of unrolls by both ways."""
    unrolls = case(seed)
    expected_advantage, expected_target = summed(unrolls, vtrace=vtrace_)
    result = estimate(unrolls, vtrace_=vtrace_)
    np.testing.assert_allclose(result.advantage.numpy(), expected_advantage, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.target.numpy(), expected_target, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("vtrace_", [False, True], ids=["gae", "vtrace"])
def test_float32_stays_close_to_float64(*, vtrace_: bool) -> None:
    unrolls = case(11, steps=128, columns=32)
    narrow = estimate(unrolls, vtrace_=vtrace_, dtype=torch.float32)
    wide = estimate(unrolls, vtrace_=vtrace_)
    torch.testing.assert_close(narrow.advantage.double(), wide.advantage, atol=1e-4, rtol=0)
    torch.testing.assert_close(narrow.target.double(), wide.target, atol=1e-4, rtol=0)


def test_on_policy_vtrace_has_the_targets_of_gae() -> None:
    tensors = case(3).tensors()
    ratios = torch.zeros_like(tensors[0])
    traced = vtrace(*tensors, ratios, discount=DISCOUNT, gae_lambda=GAE_LAMBDA, rho_clip=1.0, c_clip=1.0)
    estimated = gae(*tensors, discount=DISCOUNT, gae_lambda=GAE_LAMBDA)
    torch.testing.assert_close(traced.target, estimated.target, rtol=1e-12, atol=1e-12)


def test_on_policy_vtrace_advantage_equals_gae_at_lambda_one() -> None:
    tensors = case(4).tensors()
    ratios = torch.zeros_like(tensors[0])
    traced = vtrace(*tensors, ratios, discount=DISCOUNT, gae_lambda=1.0, rho_clip=1.0, c_clip=1.0)
    estimated = gae(*tensors, discount=DISCOUNT, gae_lambda=1.0)
    torch.testing.assert_close(traced.advantage, estimated.advantage, rtol=1e-12, atol=1e-12)


def test_on_policy_vtrace_advantage_is_away_from_gae_by_what_is_said() -> None:
    rewards, values, following, carried, valid = tensors = case(5).tensors()
    ratios = torch.zeros_like(rewards)
    traced = vtrace(*tensors, ratios, discount=DISCOUNT, gae_lambda=GAE_LAMBDA, rho_clip=1.0, c_clip=1.0)
    estimated = gae(*tensors, discount=DISCOUNT, gae_lambda=GAE_LAMBDA)
    delta = (rewards + DISCOUNT * following - values).masked_fill(~valid, 0.0)
    expected = (delta + (estimated.advantage - delta) / GAE_LAMBDA).masked_fill(~valid, 0.0)
    torch.testing.assert_close(traced.advantage, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(traced.advantage, estimated.advantage)
    assert carried.any()


def test_three_steps_by_hand() -> None:
    no = torch.tensor([[False], [False], [False]])
    ended = torch.tensor([[False], [True], [False]])
    rewards = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    observed = torch.tensor([[10.0], [20.0], [30.0], [40.0]], dtype=torch.float64)
    slot, step = torch.tensor([0]), torch.tensor([1])
    final = torch.tensor([50.0], dtype=torch.float64)
    for terminated, truncated, worth in ((ended, no, 0.0), (no, ended, 50.0)):
        following = next_values(observed, terminated, slot, step, final)
        carried = carries(terminated, truncated, ~no)
        result = gae(rewards, observed[:-1], following, carried, ~no, discount=0.5, gae_lambda=0.5)
        second = 2.0 + 0.5 * worth - 20.0
        expected = [[1.0 + 0.5 * 20.0 - 10.0 + 0.25 * second], [second], [3.0 + 0.5 * 40.0 - 30.0]]
        assert result.advantage.tolist() == expected
