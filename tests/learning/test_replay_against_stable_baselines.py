"""DQN and SAC against Stable-Baselines3, at its own boundary.

Its `train` makes a gradient step, ours makes the same.

Both begin with the same weights and get the same transitions, out of its own replay buffer. Adam's ε is
large, so that parameters move in proportion to gradients: with the usual one every tiny gradient would become
a full step.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn

from penstock.config.settings import DQNSection, PolicySection, SACSection
from penstock.learner.algorithms.off_policy.dqn import DQN
from penstock.learner.algorithms.off_policy.memory import Sample, Transitions
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.policy.policy import build
from penstock.protocol.spaces import Box, Discrete
from tests.support.experience.experience import box

ROWS, STORED = 64, 200
EPSILON, RATE, DISCOUNT = 1e-2, 3e-3, 0.97
OBSERVATION = box(3)
STEPS = 3
"""Gradient steps: later ones see moments, targets and temperatures that are no longer the first."""


class Stand(gymnasium.Env[Any, Any]):
    """An environment that is never stepped: the library wants one for its spaces."""

    def __init__(self, action: Any) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action


def theirs(kind: str, action: Any, **options: Any) -> Any:
    """A model of the library with a filled replay buffer and two hidden layers of 32."""
    model = getattr(stable_baselines3, kind)(
        "MlpPolicy",
        Stand(action),
        learning_rate=RATE,
        buffer_size=STORED,
        batch_size=ROWS,
        gamma=DISCOUNT,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [32, 32], "optimizer_kwargs": {"eps": EPSILON}},
        **options,
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    random = np.random.default_rng(1)
    for _ in range(STORED):
        observations = random.uniform(-1, 1, (2, 1, 3)).astype(np.float32)
        taken = np.array([random.integers(2)]) if kind == "DQN" else random.uniform(-0.95, 0.95, (1, 1))
        reward, done = random.normal(size=1) * 2, np.array([random.random() < 0.2])
        model.replay_buffer.add(observations[0], observations[1], taken, reward, done, [{}])
    return model


def next_sample(model: Any, seed: int, *, squashed: bool) -> Sample:
    """What the library's `train` is about to draw.

    Its buffer draws with numpy's own generator, started by `seed`.
    """
    np.random.seed(seed)  # noqa: NPY002 - the library's generator
    data = model.replay_buffer.sample(ROWS)
    np.random.seed(seed)  # noqa: NPY002
    action = data.actions.squeeze(1) if not squashed else torch.atanh(data.actions.double()).float()
    return Sample(
        Transitions(
            observation={"observation": data.observations},
            action={"action": action},
            reward=data.rewards.squeeze(1),
            discount=DISCOUNT * (1 - data.dones.squeeze(1)),
            following={"observation": data.next_observations},
        ),
        torch.arange(ROWS),
        torch.ones(ROWS),
    )


def linear(module: nn.Module) -> list[nn.Linear]:
    """The linear layers, in order."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def copy(source: nn.Module, target: list[nn.Linear]) -> None:
    """Weights and biases, layer by layer."""
    for theirs_, ours in zip(linear(source), target, strict=True):
        ours.weight.copy_(theirs_.weight)
        ours.bias.copy_(theirs_.bias)


def assert_same(source: nn.Module, target: list[nn.Linear], start: list[Tensor]) -> None:
    """Parameters are equal, by far more exactly than they have moved since `start`."""
    for theirs_, ours, before in zip(linear(source), target, start, strict=True):
        torch.testing.assert_close(ours.weight, theirs_.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.bias, theirs_.bias, rtol=1e-4, atol=1e-6)
        assert (theirs_.weight - before).abs().max() > 3e-5


@pytest.mark.parametrize("max_norm", [10.0, 0.3])
def test_dqn_learns_what_stable_baselines_learns(max_norm: float) -> None:
    model = theirs("DQN", gymnasium.spaces.Discrete(2), max_grad_norm=max_norm)
    section = DQNSection(
        double=False, discount=DISCOUNT, learning_rate=RATE, adam_epsilon=EPSILON, max_gradient_norm=max_norm
    )
    wanted = section.policy_section(PolicySection(hidden_sizes=(32, 32), activation="relu"))
    policy = build(OBSERVATION, Discrete(2), wanted, 0)
    layers = [*linear(policy.actor_body), policy.actor_head]
    copy(model.q_net, layers)
    ours = DQN(policy, section, seed=0)
    with torch.no_grad():
        # Their target has the first weights; ours is a copy of those it was made with.
        copy(model.q_net_target, [*linear(ours._target.module.actor_body), ours._target.module.actor_head])
    start = [layer.weight.clone() for layer in layers]
    for step in range(STEPS):
        sample = next_sample(model, step, squashed=False)
        model.train(gradient_steps=1, batch_size=ROWS)
        stepped = ours.gradient_step(sample, RATE)
        assert stepped.metrics["value_loss"].item() == pytest.approx(
            model.logger.name_to_value["train/loss"], rel=1e-4
        )
        assert_same(model.q_net, layers, start)


@pytest.mark.parametrize("tuned", [True, False])
def test_sac_learns_what_stable_baselines_learns(tuned: bool) -> None:
    model = theirs(
        "SAC", gymnasium.spaces.Box(-1, 1, (1,), np.float32), tau=0.05, ent_coef="auto_0.5" if tuned else 0.5
    )
    # It keeps tanh's slope away from 0 by adding 1e-6; ours is exact.
    model.actor.action_dist.epsilon = 0.0
    section = SACSection(
        discount=DISCOUNT, learning_rate=RATE, adam_epsilon=EPSILON, target_rate=0.05, temperature=0.5,
        tune_temperature=tuned, critic_hidden_sizes=(32, 32),
    )  # fmt: skip
    wanted = section.policy_section(PolicySection(hidden_sizes=(32, 32), activation="relu"))
    policy = build(OBSERVATION, Box(np.full(1, -1, np.float32), np.full(1, 1, np.float32)), wanted, 0)
    ours = SAC(policy, section, seed=0)
    if tuned:
        # The library gives the temperature's optimiser no ε of its own.
        model.ent_coef_optimizer = torch.optim.Adam([model.log_ent_coef], lr=RATE, eps=EPSILON)
    critics = [linear(critic) for critic in ours._critics.both]
    followers = [linear(critic) for critic in ours._target.module.both]
    copy_actor(model, ours)
    for mine, its in zip(
        [*critics, *followers], [*networks(model.critic), *networks(model.critic_target)], strict=True
    ):
        copy(its, mine)
    begun = [[layer.weight.clone() for layer in layers] for layers in (*critics, *followers)]
    for step in range(STEPS):
        sample = next_sample(model, step, squashed=True)
        torch.manual_seed(step)
        model.train(gradient_steps=1, batch_size=ROWS)
        ours._noise.manual_seed(step)
        metrics = ours.gradient_step(sample, RATE).metrics
        told = model.logger.name_to_value
        assert metrics["value_loss"].item() == pytest.approx(told["train/critic_loss"], rel=1e-3)
        assert metrics["policy_loss"].item() == pytest.approx(told["train/actor_loss"], rel=1e-3)
        assert metrics["temperature"].item() == pytest.approx(told["train/ent_coef"], rel=1e-4)
        assert_same_actor(model, ours)
        its_networks = [*networks(model.critic), *networks(model.critic_target)]
        for its, mine, before in zip(its_networks, [*critics, *followers], begun, strict=True):
            assert_same(its, mine, before)
    if tuned:
        torch.testing.assert_close(ours._temperature.log, model.log_ent_coef, rtol=1e-4, atol=1e-6)


def networks(critic: Any) -> list[nn.Module]:
    """Both of a library's critic."""
    return list(critic.q_networks)


@torch.no_grad()
def copy_actor(model: Any, ours: SAC) -> None:
    """Its mean and width are two layers, ours is one behind the other."""
    policy = ours.policy
    copy(model.actor.latent_pi, linear(policy.actor_body))
    policy.actor_head.weight.copy_(torch.cat([model.actor.mu.weight, model.actor.log_std.weight]))
    policy.actor_head.bias.copy_(torch.cat([model.actor.mu.bias, model.actor.log_std.bias]))


def assert_same_actor(model: Any, ours: SAC) -> None:
    """Layer by layer."""
    policy, heads = ours.policy, (model.actor.mu, model.actor.log_std)
    expected = [*linear(model.actor.latent_pi)]
    for its, mine in zip(expected, linear(policy.actor_body), strict=True):
        torch.testing.assert_close(mine.weight, its.weight, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(mine.bias, its.bias, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        policy.actor_head.weight, torch.cat([head.weight for head in heads]), rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(
        policy.actor_head.bias, torch.cat([head.bias for head in heads]), rtol=1e-3, atol=1e-5
    )
