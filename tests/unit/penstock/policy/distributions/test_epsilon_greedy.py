"""Acting by action values: ε-greedy draws, what ε is for whom, and the Q-network as a policy."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import DQNSection, PolicySection
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.distributions import EpsilonGreedy
from penstock.policy.policy import Policy, QPolicy, build
from penstock.protocol.spaces import Discrete
from tests.support.experience.experience import box

VALUES = np.array([[1.0, 5.0, 2.0, -3.0]], np.float32)


def head(epsilon: float, spread: float = 0.0, place: ExplorationSlots | None = None) -> EpsilonGreedy:
    """Of four actions."""
    made = EpsilonGreedy("action", Discrete(4))
    made.explore({"epsilon": epsilon, "epsilon_spread": spread}, place or ExplorationSlots())
    return made


def q_policy(**section: Any) -> Policy:
    """Over four numbers, three actions."""
    wanted = DQNSection().policy_section(PolicySection(**({"hidden_sizes": (16,)} | section)))
    return build(box(4), Discrete(3), wanted, 0)


def test_draws_are_epsilon_greedy_and_say_how_likely_they_were() -> None:
    made = head(0.4)
    action, log_prob = made.draw(VALUES.repeat(50_000, 0), np.random.default_rng(0))
    expected = np.array([0.1, 0.7, 0.1, 0.1])
    np.testing.assert_allclose(np.bincount(action, minlength=4) / len(action), expected, atol=0.01)
    np.testing.assert_allclose(np.exp(log_prob), expected[action], atol=1e-6)
    np.testing.assert_allclose(made.describe(VALUES)["probability"], [expected], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 4.0])
def test_a_softmax_draws_by_how_much_better_an_action_is(temperature: float) -> None:
    made = EpsilonGreedy("action", Discrete(4))
    made.explore({"epsilon": 1.0, "temperature": temperature}, ExplorationSlots())
    weights = np.exp((VALUES[0] - 5.0) / temperature)
    expected = weights / weights.sum()
    action, log_prob = made.draw(VALUES.repeat(50_000, 0), np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(action, minlength=4) / len(action), expected, atol=0.01)
    np.testing.assert_allclose(np.exp(log_prob), expected[action], rtol=1e-4)
    np.testing.assert_allclose(made.describe(VALUES)["probability"], [expected], rtol=1e-4)
    every = np.arange(4)
    np.testing.assert_allclose(np.exp(made.chance(VALUES.repeat(4, 0), every)), expected, rtol=1e-4)
    assert made.mode(VALUES)[0] == [1]
    greedy = head(0.0)
    assert (made.chooses_by_value, greedy.chooses_by_value) == (False, True)


def test_each_environment_of_the_run_explores_as_in_ape_x() -> None:
    rates = head(0.4, 7.0, ExplorationSlots(first=4, of=12)).rates(4)
    np.testing.assert_allclose(rates, [0.4 ** (1 + 7 * i / 11) for i in range(4, 8)], rtol=1e-5)
    assert head(0.4, 7.0, ExplorationSlots(first=0, of=1)).rates(1) == pytest.approx(0.4)


def test_rows_beyond_the_last_environment_act_as_that_one() -> None:
    np.testing.assert_allclose(
        head(0.4, 7.0, ExplorationSlots(first=2, of=3)).rates(3), [0.4**8] * 3, rtol=1e-5
    )
    np.testing.assert_allclose(head(0.4, 7.0).rates(3), [0.4] * 3, rtol=1e-5)


def test_rates_follow_what_is_told_next() -> None:
    made = head(1.0)
    assert made.rates(2).tolist() == [1.0, 1.0]
    made.explore({"epsilon": 0.0}, ExplorationSlots())
    assert made.rates(2).tolist() == [0.0, 0.0]


def test_who_is_told_nothing_acts_greedily() -> None:
    made = EpsilonGreedy("action", Discrete(4))
    made.explore({}, ExplorationSlots())
    action, log_prob = made.draw(VALUES.repeat(100, 0), np.random.default_rng(0))
    assert set(action.tolist()) == {1}
    np.testing.assert_allclose(log_prob, 0.0, atol=1e-6)


def test_what_is_masked_is_never_drawn() -> None:
    made = head(0.5)
    allowed = np.array([[True, False, True, True]])
    masked = made.masked(VALUES, allowed).repeat(30_000, 0)
    action, log_prob = made.draw(masked, np.random.default_rng(0))
    expected = np.array([0.5 / 3, 0.0, 0.5 + 0.5 / 3, 0.5 / 3])
    np.testing.assert_allclose(np.bincount(action, minlength=4) / len(action), expected, atol=0.015)
    np.testing.assert_allclose(np.exp(log_prob), expected[action], atol=1e-6)


def test_the_probe_sees_every_value_whatever_epsilon_is() -> None:
    policy = q_policy()
    observation = {"observation": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)}
    action = policy.act(observation, deterministic=True).action
    before = policy.acting_log_prob(observation, action)
    policy.explore({"epsilon": 0.7}, ExplorationSlots())
    assert np.array_equal(policy.acting_log_prob(observation, action), before)
    np.testing.assert_allclose(policy.log_prob(observation, action), before, atol=1e-6)
    with torch.no_grad():
        policy.actor_head.weight[0, 0] += 0.5
    assert not np.allclose(policy.acting_log_prob(observation, action), before, atol=1e-3)
    with torch.no_grad():
        policy.actor_head.weight.mul_(1e6)
    np.testing.assert_allclose(
        policy.acting_log_prob(observation, action), policy.log_prob(observation, action), atol=1e-5
    )


@pytest.mark.parametrize("section", [{}, {"dueling": True}, {"dueling": True, "shared_trunk": True}])
def test_a_q_policy_acts_by_the_values_that_it_learns(section: dict[str, Any]) -> None:
    policy = q_policy(**section)
    assert isinstance(policy, QPolicy)
    torch.nn.init.normal_(policy.actor_head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    observation = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    seen = {"observation": torch.from_numpy(observation)}
    outputs = policy.outputs(policy.read(seen))
    acted = policy.act({"observation": observation}, deterministic=True).action["action"]
    assert acted.tolist() == outputs.parameters.argmax(1).tolist()
    torch.testing.assert_close(policy.value(seen), outputs.parameters.amax(1))
    np.testing.assert_allclose(policy.values({"observation": observation}), outputs.value.detach(), atol=1e-6)


def test_dueling_values_are_a_value_and_advantages_without_their_mean() -> None:
    policy = q_policy(dueling=True)
    seen = {"observation": torch.randn(8, 4)}
    inputs = policy.read(seen)
    assert policy.critic_body is not None
    value = policy.critic_head(policy.critic_body(inputs)).squeeze(1)
    torch.testing.assert_close(policy.outputs(inputs).parameters.mean(1), value)


def test_only_dueling_has_two_streams() -> None:
    assert q_policy().critic_body is None
    assert q_policy(dueling=True).critic_body is not None
    assert q_policy(dueling=True, shared_trunk=True).critic_body is None
