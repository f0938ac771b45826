"""Rewards and advantages of thoughts, beside sums written out."""

import pytest
import torch

from penstock.workloads.thoughts import reinforce as advantages

GROUP = torch.tensor([0, 0, 1, 1, 1])
ROW = torch.tensor([0, 0, 1, 2, 3, 3, 4])
REWARD = torch.tensor([1.0, 3.0, 0.0, 2.0, 4.0])


def test_another_question_gives_the_reward() -> None:
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    found = advantages.of_another_question(torch.arange(6.0), group)
    assert found.tolist() == [2.0, 3.0, 4.0, 5.0, 0.0, 1.0]


def test_a_group_mean_is_that_of_the_others() -> None:
    found = advantages.return_advantages(REWARD, ROW, GROUP, value=None, is_grouped=True)
    expected = [1.0 - 3.0, 1.0 - 3.0, 3.0 - 1.0, 0.0 - 3.0, 2.0 - 2.0, 2.0 - 2.0, 4.0 - 1.0]
    assert found.tolist() == pytest.approx(expected)


def test_a_thought_that_is_alone_keeps_nothing_of_a_group() -> None:
    found = advantages.return_advantages(
        torch.tensor([2.0]), torch.tensor([0, 0]), torch.tensor([0]), value=None, is_grouped=True
    )
    assert found.tolist() == [0.0, 0.0]


def test_a_learned_guess_is_taken_away_token_by_token() -> None:
    value = torch.arange(7.0) / 10
    learned = advantages.return_advantages(REWARD, ROW, GROUP, value=value, is_grouped=False)
    assert learned.tolist() == pytest.approx((REWARD[ROW] - value).tolist())
    both = advantages.return_advantages(REWARD, ROW, GROUP, value=value, is_grouped=True)
    left = REWARD[ROW] - value
    means = [left[:2].mean(), left[2], left[3], left[4:6].mean(), left[6]]
    of_group = [(means[0] + means[1]) / 2, (means[2] + means[3] + means[4]) / 3]
    scale = [2.0, 1.5]
    expected = [(left[token] - of_group[GROUP[ROW[token]]]) * scale[GROUP[ROW[token]]] for token in range(7)]
    assert both.tolist() == pytest.approx([float(one) for one in expected])


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_runs_along_the_tokens_of_a_thought(discount: float, gae_lambda: float) -> None:
    value = torch.tensor([0.5, -0.2, 0.1, 0.9, 0.3, 0.4, -1.0])
    last = torch.tensor([1, 2, 3, 5, 6])
    found = advantages.gae_advantages(REWARD, value, ROW, discount=discount, gae_lambda=gae_lambda)
    expected = []
    for token in range(7):
        end = int(last[ROW[token]])
        total = 0.0
        for later in range(token, end + 1):
            following = REWARD[ROW[token]] if later == end else discount * value[later + 1]
            total += (discount * gae_lambda) ** (later - token) * float(following - value[later])
        expected.append(total)
    assert found.tolist() == pytest.approx(expected)
