"""PPO's losses, gradients and steps against Stable-Baselines3, on the same experience and weights.

Its own policy computes values and log-probabilities, its own `RolloutBuffer` the advantages, and its own
`train` the losses and the steps of its Adam, in float32. One minibatch per epoch, because permutations
are each library's own; several epochs, so that ratios leave 1 and the clip works.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.settings import PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import Batch, assemble
from penstock.policy.policy import Policy
from penstock.protocol.spaces import Space
from tests.support.experience.experience import Collector, Environment, box, cartpoles, small_policy

STEPS, COLUMNS, EPOCHS = 48, 4, 5
NUMBERS: dict[str, Any] = {"discount": 0.97, "gae_lambda": 0.9, "clip_range": 0.1, "learning_rate": 3e-3}
LAYERS = {
    "actor_body.layers.0": "mlp_extractor.policy_net.0",
    "actor_body.layers.2": "mlp_extractor.policy_net.2",
    "actor_head": "action_net",
    "critic_body.layers.0": "mlp_extractor.value_net.0",
    "critic_body.layers.2": "mlp_extractor.value_net.2",
    "critic_head": "value_net",
}


class Pushed(gymnasium.ActionWrapper[Any, Any, Any]):
    """CartPole with two real numbers for an action: the larger one wins."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def action(self, action: Any) -> int:
        """The index of the larger."""
        return int(np.argmax(action))


def pushed(count: int, **kwargs: Any) -> list[Environment]:
    """With real actions."""
    return [Pushed(environment) for environment in cartpoles(count, **kwargs)]  # type: ignore[arg-type]


def names(policy: Policy) -> dict[str, str]:
    """Our parameters by the name of theirs."""
    found = {
        f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in LAYERS.items() for kind in ("weight", "bias")
    }
    return found | {name: "log_std" for name, _ in policy.named_parameters() if name.startswith("heads.")}


def library(policy: Policy, environment: Any, epochs: int) -> Any:
    """Its PPO with our weights and numbers; one environment in it stands for the spaces."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    model = stable_baselines3.PPO(
        "MlpPolicy",
        environment,
        n_steps=STEPS,
        batch_size=STEPS * COLUMNS,
        n_epochs=epochs,
        gamma=NUMBERS["discount"],
        gae_lambda=NUMBERS["gae_lambda"],
        clip_range=NUMBERS["clip_range"],
        learning_rate=NUMBERS["learning_rate"],
        ent_coef=0.01,
        vf_coef=0.25,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": {"pi": [16, 16], "vf": [16, 16]}},
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    ours = policy.state_dict()
    theirs = {
        name: ours[own].reshape(model.policy.state_dict()[name].shape) for own, name in names(policy).items()
    }
    model.policy.load_state_dict(theirs)
    return model


def fill(model: Any, batch: Batch) -> None:
    """The batch into its buffer, and its advantages.

    A truncated step is bootstrapped in the reward, as it does.
    """
    from stable_baselines3.common.buffers import RolloutBuffer

    space, action = model.observation_space, model.action_space
    buffer = RolloutBuffer(
        STEPS, space, action, gamma=model.gamma, gae_lambda=model.gae_lambda, n_envs=COLUMNS
    )
    observation = batch.observation["observation"]
    ended = torch.cat([torch.ones(1, COLUMNS, dtype=torch.bool), batch.terminated | batch.truncated])
    rewards = batch.reward.clone()
    with torch.no_grad():
        values = torch.stack([model.policy.predict_values(row)[:, 0] for row in observation])
        final = model.policy.predict_values(batch.final_observation["observation"])[:, 0]
    cut = (batch.truncated & ~batch.terminated)[batch.final_step, batch.final_slot]
    rewards[batch.final_step[cut], batch.final_slot[cut]] += model.gamma * final[cut]
    for t in range(STEPS):
        taken = batch.action["action"][t].reshape(COLUMNS, -1).numpy()
        buffer.add(
            observation[t].numpy(), taken, rewards[t].numpy(), ended[t].numpy(), values[t], batch.log_prob[t]
        )
    buffer.compute_returns_and_advantage(values[STEPS], ended[STEPS].numpy())
    model.rollout_buffer = buffer


def gradients(ppo: PPO) -> dict[str, Tensor]:
    """Those of the last step, by our names, scaled to the largest norm."""
    optimiser = ppo._optimiser
    return dict(zip(optimiser._names, optimiser.gradient_views, strict=True))


CASES: dict[str, tuple[Space | None, Any]] = {"discrete": (None, cartpoles), "continuous": (box(2), pushed)}


@pytest.mark.parametrize("epochs", [1, EPOCHS])
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_stable_baselines(case: str, epochs: int) -> None:
    action, make = CASES[case]
    policy, acted = (small_policy(seed, action) for seed in (1, 2))
    with torch.no_grad():
        policy.actor_head.weight.mul_(100 if action else 1000)
    collectors = [Collector(make(2, max_episode_steps=15), session) for session in (1, 2)]
    batch = assemble([c.fragment(acted, STEPS) for c in collectors], torch.device("cpu"))
    assert bool(batch.truncated.any())
    assert bool(batch.terminated.any())
    model = library(policy, make(1)[0], epochs)
    fill(model, batch)
    model.train()
    section = PPOSection(
        objective="coupled", epochs=epochs, minibatches=1, entropy_coefficient=0.01, value_coefficient=0.5,
        **NUMBERS,
    )  # fmt: skip
    ppo = PPO(policy, section, seed=0)
    metrics = ppo.update(batch, progress=0.0).metrics
    told = model.logger.name_to_value
    assert metrics["policy_loss"] == pytest.approx(told["train/policy_gradient_loss"], rel=1e-4, abs=1e-6)
    # Our value loss has the ½ in it.
    assert 2 * metrics["value_loss"] == pytest.approx(told["train/value_loss"], rel=1e-5)
    assert metrics["clip_fraction"] > 0.05
    theirs = dict(model.policy.named_parameters())
    for own, name in names(policy).items():
        parameter, gradient = policy.get_parameter(own), gradients(ppo)[own]
        expected = theirs[name]
        assert expected.grad is not None
        torch.testing.assert_close(gradient, expected.grad.reshape(gradient.shape), rtol=2e-4, atol=2e-6)
        torch.testing.assert_close(parameter, expected.reshape(parameter.shape), rtol=2e-4, atol=2e-6)
