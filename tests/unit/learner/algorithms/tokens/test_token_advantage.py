"""Rewards and advantages of tokens, against their definitions."""

import pytest
import torch
from torch import Tensor

from penstock.learner.algorithms.responses import (
    DEVIATION_FLOOR,
    divergence_reward,
    group_relative,
    leave_one_out,
    returns,
    scored,
    token_gae,
    turn_discounts,
    whitened,
)

COUNTS = (4, 1, 3)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and which tokens there are, of responses of different lengths: [S, R] each."""
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.arange(max(COUNTS))[:, None] < torch.tensor(COUNTS)
    reward, value = (torch.randn(sampled.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return reward.where(sampled, 0.0), value.where(sampled, 0.0), sampled


@pytest.mark.parametrize(
    ("discount", "gae_lambda", "value_lambda"), [(1.0, 0.95, 1.0), (0.9, 0.5, 0.5), (1.0, 0.0, 1.0)]
)
def test_gae_is_the_sum_that_defines_it(discount: float, gae_lambda: float, value_lambda: float) -> None:
    reward, value, sampled = tokens()
    estimated = token_gae(
        reward, value, sampled, discount=discount, gae_lambda=gae_lambda, value_lambda=value_lambda
    )
    for row, count in enumerate(COUNTS):
        r, v = reward[:count, row].tolist(), [*value[:count, row].tolist(), 0.0]
        delta = [r[t] + discount * v[t + 1] - v[t] for t in range(count)]
        for t in range(count):
            wanted = sum((discount * gae_lambda) ** (k - t) * delta[k] for k in range(t, count))
            target = v[t] + sum((discount * value_lambda) ** (k - t) * delta[k] for k in range(t, count))
            assert estimated.advantage[t, row].item() == pytest.approx(wanted, abs=1e-12)
            assert estimated.target[t, row].item() == pytest.approx(target, abs=1e-12)
        assert not estimated.advantage[count:, row].any()
        assert not estimated.target[count:, row].any()


def test_between_turns_what_follows_counts_less() -> None:
    reward, value, sampled = tokens()
    turn_end = torch.zeros_like(sampled)
    turn_end[1, 0] = turn_end[0, 2] = True
    discount = turn_discounts(turn_end, discount=0.9, turn_discount=0.5).double()
    estimated = token_gae(reward, value, sampled, discount=discount, gae_lambda=1.0, value_lambda=1.0)
    for row, count in enumerate(COUNTS):
        for t in range(count):
            worth = sum(
                0.9 ** (k - t) * 0.5 ** int(turn_end[t:k, row].sum()) * reward[k, row].item()
                for k in range(t, count)
            )
            assert estimated.target[t, row].item() == pytest.approx(worth, abs=1e-6)
            assert estimated.advantage[t, row].item() == pytest.approx(worth - value[t, row].item(), abs=1e-6)


def test_a_row_that_goes_on_is_worth_what_follows_it() -> None:
    reward, value, sampled = tokens()
    beyond = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    ended, going_on = (
        token_gae(reward, value, sampled, discount=0.9, gae_lambda=1.0, value_lambda=1.0, beyond=one)
        for one in (None, beyond)
    )
    for row, count in enumerate(COUNTS):
        for t in range(count):
            more = (going_on.target - ended.target)[t, row].item()
            assert more == pytest.approx(0.9 ** (count - t) * beyond[row].item(), abs=1e-12)
    assert not going_on.target[~sampled].any()


def test_at_lambda_one_the_advantage_is_the_return_less_the_value() -> None:
    reward, value, sampled = tokens()
    estimated = token_gae(reward, value, sampled, discount=1.0, gae_lambda=1.0, value_lambda=1.0)
    whole = torch.flip(torch.flip(reward, [0]).cumsum(0), [0])
    assert torch.allclose(estimated.advantage, (whole - value).where(sampled, 0.0))
    assert torch.allclose(estimated.target, whole.where(sampled, 0.0))
    assert torch.allclose(returns(reward, sampled, discount=1.0), whole.where(sampled, 0.0))


def test_the_penalties_of_a_token() -> None:
    divergence = divergence_reward(torch.tensor([0.5, -30.0, 30.0, 0.0]), coefficient=0.1, bound=10.0)
    assert divergence.tolist() == pytest.approx([-0.05, 1.0, -1.0, 0.0])
    score = scored(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0]), eos_penalty=0.25)
    assert score.tolist() == [1.0, -1.25]


def test_a_response_is_held_against_the_others_of_its_group() -> None:
    sampled = torch.ones((2, 4), dtype=torch.bool)
    reward = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 3.0, 7.0, 5.0]])
    group = torch.tensor([0, 0, 1, 1])
    free = torch.zeros_like(reward)
    plain = group_relative(reward, free, sampled, group, discount=1.0, by_deviation=False)
    assert plain.tolist() == [[-1.0, 1.0, 1.0, -1.0]] * 2
    reward[1, 1] = 5.0
    divided = group_relative(reward, free, sampled, group, discount=1.0, by_deviation=True)
    assert divided[0].tolist() == pytest.approx([-1.0, 1.0, 1.0, -1.0])


@pytest.mark.parametrize("beta", [0.05, 0.005, 0.001, 0.0])
@pytest.mark.parametrize("by_deviation", [True, False])
def test_a_group_of_equal_scores_moves_the_policy_by_beta_alone(beta: float, by_deviation: bool) -> None:
    log_ratio = torch.tensor([[-0.02, -0.27, -0.01, 0.13], [0.4, 0.1, 0.0, -0.3]])
    sampled = torch.tensor([[True] * 4, [True, True, False, True]])
    score = torch.tensor([[0.0] * 4, [1.0] * 4]).where(sampled, 0.0)
    score[0, 2] = 1.0
    divergence = divergence_reward(log_ratio.where(sampled, 0.0), coefficient=beta, bound=10.0)
    advantage = group_relative(
        score, divergence, sampled, torch.zeros(4, dtype=torch.long), discount=1.0, by_deviation=by_deviation
    )
    expected = -beta * (log_ratio - log_ratio[sampled].mean())
    assert advantage[sampled].tolist() == pytest.approx(expected[sampled].tolist(), abs=1e-6)
    assert not advantage[~sampled].any()


def test_a_deviation_divides_scores_and_not_the_divergence() -> None:
    sampled = torch.ones((2, 2), dtype=torch.bool)
    divergence = torch.tensor([[0.1, -0.1], [0.3, -0.3]])
    for size in (1e-3, 1.0, 1e3):
        score = torch.tensor([[0.0, 0.0], [size, 3.0 * size]])
        group = torch.zeros(2, dtype=torch.long)
        advantage = group_relative(score, divergence, sampled, group, discount=1.0, by_deviation=True)
        assert (advantage - divergence)[0].tolist() == pytest.approx([-1.0, 1.0], rel=1e-4)
        assert (advantage - divergence)[1].tolist() == pytest.approx([-1.0, 1.0], rel=1e-4)


@pytest.mark.parametrize("by_deviation", [True, False])
def test_a_response_without_a_group_keeps_its_signal(by_deviation: bool) -> None:
    sampled = torch.ones((1, 3), dtype=torch.bool)
    reward = torch.tensor([[1.0, 0.0, 0.0]])
    group = torch.tensor([0, 1, 1])
    free = torch.zeros_like(reward)
    advantage = group_relative(reward, free, sampled, group, discount=1.0, by_deviation=by_deviation)
    assert advantage[0, 0] > 0.5
    assert advantage[0, 1:].tolist() == [0.0, 0.0]
    one = reward[:, :1], free[:, :1], sampled[:, :1], group[:1]
    assert group_relative(*one, discount=1.0, by_deviation=by_deviation).tolist() == [[1.0]]


def test_the_baseline_of_a_response_is_the_mean_of_the_others() -> None:
    sampled = torch.tensor([[True, True], [True, False]])
    reward = torch.tensor([[1.0, 4.0], [2.0, 0.0]])
    assert leave_one_out(reward, sampled, discount=1.0).tolist() == [[-1.0, 1.0], [-2.0, 0.0]]
    assert leave_one_out(reward[:, :1], sampled[:, :1], discount=1.0).tolist() == [[3.0], [2.0]]


def test_whitening_deletes_no_single_response_and_blows_nothing_up() -> None:
    one = torch.tensor([0.3, 0.3, 0.3])
    assert torch.equal(whitened(one, 1), one)
    many = whitened(torch.tensor([1.0, 2.0, 3.0, 6.0]), 2)
    assert many.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert many.std(correction=0).item() == pytest.approx(1.0)
    alike = torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-6])
    assert whitened(alike, 4).abs().max() <= 1e-6 / DEVIATION_FLOOR
