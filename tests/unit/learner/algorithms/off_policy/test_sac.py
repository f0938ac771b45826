"""SAC as an algorithm: what it learns, what is undone, what a checkpoint holds."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import ConfigurationError, PolicySection, SACSection
from penstock.learner.algorithms.algorithm import Algorithm, Settles
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.policy.policy import build
from penstock.protocol.spaces import Dict, Discrete
from tests.support.experience.experience import box
from tests.support.experience.replay_worlds import one_shot, soft_policy

BEST = 0.4
SMALL: dict[str, Any] = {
    "capacity": 1000,
    "learning_starts": 64,
    "batch_size": 64,
    "error_steps": 64,
    "learning_rate": 5e-3,
    "critic_hidden_sizes": (32,),
    "publish_period": 20,
}


def make(seed: int = 0, policy: dict[str, Any] | None = None, **section: Any) -> SAC:
    """A small SAC."""
    settings = SACSection(**(SMALL | section))
    return SAC(soft_policy(settings, **(policy or {})), settings, seed=seed)


def test_it_finds_the_best_action_and_the_entropy_that_was_asked_for() -> None:
    algorithm = make(target_entropy=-1.0, temperature=0.2)
    entropy = 0.0
    for number in range(1, 11):
        update = algorithm.update(one_shot(algorithm.policy, number, BEST), progress=0.0)
        entropy = update.metrics.get("entropy", 0.0)
    states = {"observation": np.random.default_rng(0).uniform(-1, 1, (64, 2)).astype(np.float32)}
    mean = np.tanh(algorithm.policy.act(states, deterministic=True).action["action"])
    assert np.abs(mean - BEST).max() < 0.15
    assert entropy == pytest.approx(-1.0, abs=0.25)


def test_it_is_an_algorithm_that_publishes_the_actor_alone() -> None:
    algorithm: Algorithm = make()
    assert algorithm.settles is Settles.ON_INSERT
    assert algorithm.scalars(0.5) == {}
    (published,) = algorithm.published_modules().values()
    assert not any("critics" in name for name in published.state_dict())
    names = algorithm.state().tensors
    assert {"critics/both.0.head.weight", "target/both.1.head.weight", "temperature/log"} <= names.keys()
    assert make().policy.values({"observation": np.ones((3, 2), np.float32)}).tolist() == [0.0, 0.0, 0.0]


def test_an_update_makes_a_gradient_step_for_each_step_that_came() -> None:
    algorithm = make()
    update = algorithm.update(one_shot(algorithm.policy, 1, BEST), progress=0.0)
    assert update.gradient_steps == 64


def test_a_temperature_that_is_not_tuned_stays() -> None:
    algorithm = make(tune_temperature=False, temperature=0.3)
    update = algorithm.update(one_shot(algorithm.policy, 1, BEST), progress=0.0)
    assert update.metrics["temperature"] == pytest.approx(0.3)


def test_actions_in_parts_are_learned_together() -> None:
    section = SACSection(**SMALL)
    space = Dict((("arm", box(2)), ("leg", box(1, low=0.0, high=3.0))))
    policy = build(box(2), space, section.policy_section(PolicySection(hidden_sizes=(16,))), 0)
    algorithm = SAC(policy, section, seed=0)
    observation = torch.rand(5, 2)
    action, log_prob = algorithm._draw(policy.read({"observation": observation}))
    assert action.shape == (5, 3)
    raw = torch.atanh(action.double()).float()
    parts = {"action/arm": raw[:, :2], "action/leg": raw[:, 2:]}
    outputs = policy.outputs(policy.read({"observation": observation}))
    again = policy.joint_log_prob(outputs.parameters, parts)
    torch.testing.assert_close(again, log_prob, rtol=1e-3, atol=1e-3)


def test_other_actions_are_refused_with_what_takes_them() -> None:
    section = SACSection()
    policy = build(box(4), Discrete(2), section.policy_section(PolicySection()), 0)
    with pytest.raises(ConfigurationError, match=r"algorithm\.name='sac'.*Discrete.*'dqn'"):
        SAC(policy, section, seed=0)
