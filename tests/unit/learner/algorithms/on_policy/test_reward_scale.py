"""Rewards divided by the deviation of the discounted return."""

from dataclasses import replace

import numpy as np
import torch

from penstock.learner.algorithms.ppo import CLIP, RewardScale
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.batch import Batch
from tests.support.experience.experience import collect, small_policy

DISCOUNT = 0.9


def batch(rewards: np.ndarray, ends: np.ndarray, slots: tuple[tuple[int, int], ...]) -> Batch:
    """Rewards [T, B], and where an episode ends."""
    whole = collect(small_policy(), steps=len(rewards))
    return replace(
        whole,
        reward=torch.from_numpy(rewards.astype(np.float32)),
        terminated=torch.from_numpy(ends),
        truncated=torch.zeros(ends.shape, dtype=torch.bool),
        valid=torch.ones(ends.shape, dtype=torch.bool),
        slots=slots,
    )


def returns_of(rewards: np.ndarray, ends: np.ndarray) -> list[float]:
    """The discounted return after each step of one environment."""
    result, current = [], 0.0
    for reward, end in zip(rewards, ends, strict=True):
        current = DISCOUNT * current + reward
        result.append(current)
        current = 0.0 if end else current
    return result


def test_returns_run_on_through_columns_and_batches_of_one_environment() -> None:
    random = np.random.default_rng(0)
    rewards, ends = random.standard_normal((2, 6, 3)), random.random((2, 6, 3)) < 0.2
    scale, slots = RewardScale(DISCOUNT, RankGroup()), ((1, 0), (1, 0), (2, 0))
    for part in range(2):
        scaled = scale.scale(batch(rewards[part], ends[part], slots))
        scale.commit(scaled)
    first = [
        returns_of(
            np.concatenate([rewards[p, :, c] for p in range(2) for c in (0, 1)]),
            np.concatenate([ends[p, :, c] for p in range(2) for c in (0, 1)]),
        )
    ]
    second = returns_of(rewards[:, :, 2].flatten(), ends[:, :, 2].flatten())
    deviation = np.std(np.concatenate([*first, second]))
    expected = np.clip(rewards[1] / deviation, -CLIP, CLIP)
    np.testing.assert_allclose(scaled.rewards.numpy(), expected, rtol=1e-5)


def test_nothing_changes_without_commit_and_state_survives() -> None:
    random = np.random.default_rng(1)
    part = batch(random.standard_normal((5, 4)), np.zeros((5, 4), bool), ((1, 0), (1, 1), (2, 0), (2, 1)))
    scale = RewardScale(DISCOUNT, RankGroup())
    first = scale.scale(part).rewards
    assert torch.equal(scale.scale(part).rewards, first)
    scale.commit(scale.scale(part))
    copy = RewardScale(DISCOUNT, RankGroup())
    copy.load(scale.state())
    assert torch.equal(copy.scale(part).rewards, scale.scale(part).rewards)
    assert not torch.equal(scale.scale(part).rewards, first)
