"""An episode that is cut off is worth what would have followed; one that ends is worth nothing more."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.actor.acting.stepper import Observation
from penstock.config.settings import PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import assemble
from penstock.policy.policy import Policy
from tests.learning import small_form
from tests.support.experience import held_memory
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


def value(policy: Policy, shown: Observation) -> float:
    """V of one observation, by path."""
    with torch.no_grad():
        return float(policy.value({path: torch.from_numpy(array) for path, array in shown.items()}))


@pytest.mark.promise("truncation-termination")
def test_only_truncation_learns_the_endless_return() -> None:
    found = value(trained("truncated"), {"observation": np.array([0, 1, 0, 0], np.float32)})
    assert abs(found - 1 / (1 - DISCOUNT)) < 0.05 / (1 - DISCOUNT)


@pytest.mark.promise("truncation-termination")
def test_termination_learns_the_reward_at_the_last_step() -> None:
    policy = trained("terminated")
    for position in range(5):
        expected = sum(DISCOUNT**k for k in range(5 - position))
        found = value(policy, {"observation": np.array([position / 5, 1, 0, 0], np.float32)})
        assert abs(found - expected) < 0.05 * expected


def values(kwargs: dict[str, Any], mask_key: str) -> list[float]:
    """V of the two states of `held_memory` after training with default settings of the environment."""
    settings = small_form.settings_of(
        held_memory.TASK,
        1,
        60 * 64,
        environment={"count": 4, "kwargs": kwargs, "mask_key": mask_key},
        actor={"count": 1, "unroll_length": 16},
        policy={"hidden_sizes": [16]},
        algorithm={
            "discount": held_memory.DISCOUNT,
            "batch_steps": 64,
            "minibatches": 1,
            "learning_rate": 0.05,
            "learning_rate_schedule": "linear",
            "max_gradient_norm": 0.0,
            "scale_rewards": False,
        },
    )
    run, policy = small_form.trained(settings)
    stepper = run.make_environment(run.environment, 1, 0)
    first = value(policy, stepper.reset([0]))
    later = value(policy, stepper.step(np.zeros(1, np.int64)).observation)
    stepper.close()
    return [first, later]


@pytest.mark.promise("last-observation-episode-mask")
@pytest.mark.parametrize("way", held_memory.WAYS)
def test_the_endless_return_is_learned_whatever_memory_observations_lie_in(way: str) -> None:
    expected = [held_memory.FIRST_VALUE, held_memory.LATER_VALUE]
    assert values({"way": way}, "") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("way", ["new", "one_dict_with_the_mask"])
def test_an_environment_that_raises_for_an_action_outside_its_mask_is_trained(way: str) -> None:
    expected = [held_memory.FIRST_VALUE, held_memory.LATER_VALUE]
    assert values({"way": way, "strict": True}, "mask") == pytest.approx(expected, rel=0.01)
