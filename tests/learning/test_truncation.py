"""An episode that is cut off is worth what would have followed; one that ends is worth nothing more."""

import numpy as np
import torch

from learner.algorithms.on_policy.ppo import PPO
from learner.batch import assemble
from penstock.config.settings import PPOSection
from penstock.policy.policy import Policy
from penstock.wire.tensor import Array
from tests.support.experience.experience import Collector, Line, small_policy

DISCOUNT = 0.9
SECTION = PPOSection(
    discount=DISCOUNT, value_clip=None, learning_rate=3e-3, epochs=4, minibatches=2, max_gradient_norm=0.0
)


def trained(how: str, updates: int = 150) -> Policy:
    """A policy after PPO on lines of five steps that all end as `how` says."""
    policy = small_policy(1)
    ppo = PPO(policy, SECTION, seed=2)
    collector = Collector([Line(5, how) for _ in range(8)])
    for _ in range(updates):
        batch = assemble([collector.fragment(policy, 16)], torch.device("cpu"))
        assert ppo.update(batch, progress=0.0).applied
    return policy


def value(policy: Policy, observation: Array) -> float:
    """V of one observation."""
    with torch.no_grad():
        return float(policy.value({"observation": torch.from_numpy(observation)}))


def test_only_truncation_learns_the_endless_return() -> None:
    """V = r/(1−γ) = 10 within 5%, although no episode is longer than five steps."""
    found = value(trained("truncated"), np.array([0, 1, 0, 0], np.float32))
    assert abs(found - 1 / (1 - DISCOUNT)) < 0.05 / (1 - DISCOUNT)


def test_termination_learns_the_reward_at_the_last_step() -> None:
    """V = r = 1 one step before the end, and the discounted sum before."""
    policy = trained("terminated")
    for position in range(5):
        expected = sum(DISCOUNT**k for k in range(5 - position))
        found = value(policy, np.array([position / 5, 1, 0, 0], np.float32))
        assert abs(found - expected) < 0.05 * expected
