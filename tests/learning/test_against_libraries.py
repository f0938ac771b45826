"""Losses, gradients and steps against other implementations, on the same experience and weights.

Stable-Baselines3's own policy computes values and log-probabilities, its `RolloutBuffer` the advantages, its
`train` the losses and the steps of its Adam, in float32. One minibatch per epoch, as permutations are each
library's own; several epochs, so that ratios leave 1 and the clip works. DQN and SAC get its buffer's
transitions. Adam's ε is large there, so that parameters move in proportion to gradients: with the usual one
every tiny gradient would become a full step.

TorchRL is called where its users call it, in float64: its functions estimate advantages from its critic's
values, and `A2CLoss` with those is its IMPALA (and, with λ = 1, its REINFORCE). Its `VTrace` is not used: it
draws another action for log π than the one that was taken.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn

from penstock.config.settings import (
    DQNSection,
    ImpalaSection,
    PolicySection,
    PPOSection,
    ReinforceSection,
    SACSection,
)
from penstock.learner.algorithms.off_policy.dqn import DQN
from penstock.learner.algorithms.off_policy.memory import Sample, Transitions
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.learner.algorithms.ppo import PPO, Impala, OnPolicy, Reinforce
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.batch import Batch, assemble
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Box, Discrete, Space
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
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def action(self, action: Any) -> int:
        return int(np.argmax(action))


def pushed(count: int, **kwargs: Any) -> list[Environment]:
    return [Pushed(environment) for environment in cartpoles(count, **kwargs)]  # type: ignore[arg-type]


def names(policy: Policy) -> dict[str, str]:
    found = {
        f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in LAYERS.items() for kind in ("weight", "bias")
    }
    return found | {name: "log_std" for name, _ in policy.named_parameters() if name.startswith("heads.")}


def library(policy: Policy, environment: Any, epochs: int) -> Any:
    model = stable_baselines3.PPO(
        "MlpPolicy",
        environment,
        n_steps=STEPS,
        batch_size=STEPS * COLUMNS,
        n_epochs=epochs,
        gamma=NUMBERS["discount"],
        **{name: value for name, value in NUMBERS.items() if name != "discount"},
        ent_coef=0.01,
        vf_coef=0.25,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": {"pi": [16, 16], "vf": [16, 16]}},
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    ours, theirs = policy.state_dict(), model.policy.state_dict()
    for own, name in names(policy).items():
        theirs[name] = ours[own].reshape(theirs[name].shape)
    model.policy.load_state_dict(theirs)
    return model


def fill(model: Any, batch: Batch) -> None:
    """The batch into its buffer, and its advantages.

    A truncated step is bootstrapped in the reward, as it does.
    """
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


def experience(behaviour: Policy, steps: int, make: Any = cartpoles) -> Batch:
    collectors = [Collector(make(2, max_episode_steps=15), session) for session in (1, 2)]
    batch = assemble([c.fragment(behaviour, steps) for c in collectors], torch.device("cpu"))
    assert bool(batch.terminated.any()), "no episode fell"
    assert bool(batch.truncated.any()), "no episode was cut"
    return batch


def named_gradients(algorithm: OnPolicy[Any]) -> dict[str, Tensor]:
    optimiser = algorithm._optimiser
    return dict(zip(optimiser._names, optimiser.gradient_views, strict=True))


CASES: dict[str, tuple[Space | None, Any]] = {"discrete": (None, cartpoles), "continuous": (box(2), pushed)}


@pytest.mark.parametrize("epochs", [1, EPOCHS])
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_stable_baselines(case: str, epochs: int) -> None:
    action, make = CASES[case]
    policy, acted = (small_policy(seed, action) for seed in (1, 2))
    with torch.no_grad():
        policy.actor_head.weight.mul_(100 if action else 1000)
    batch = experience(acted, STEPS, make)
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
        parameter, gradient = policy.get_parameter(own), named_gradients(ppo)[own]
        expected = theirs[name]
        assert expected.grad is not None
        torch.testing.assert_close(gradient, expected.grad.reshape(gradient.shape), rtol=2e-4, atol=2e-6)
        torch.testing.assert_close(parameter, expected.reshape(parameter.shape), rtol=2e-4, atol=2e-6)


SHORT_STEPS = 24
# TorchRL keeps its numbers in float32; these lose nothing there.
DISCOUNT, TRACE, ENTROPY, VALUE = 31 / 32, 7 / 8, 1 / 64, 1 / 2


def policies() -> tuple[Policy, Policy]:
    learns, acted = small_policy(1), small_policy(2)
    with torch.no_grad():
        # Away from the uniform start, so that ratios are above and below 1.
        learns.actor_head.weight.mul_(1000)
        acted.actor_head.weight.mul_(100)
    return learns.double(), acted


def network(policy: Policy, part: str) -> nn.Sequential:
    state = policy.state_dict()
    layers: list[nn.Module] = []
    for name in (layer for layer in LAYERS if layer.startswith(part)):
        weight = state[f"{name}.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        linear.load_state_dict({"weight": weight, "bias": state[f"{name}.bias"]})
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Library:
    def __init__(self, policy: Policy, batch: Batch) -> None:
        from tensordict import TensorDict
        from tensordict.nn import TensorDictModule
        from torchrl.modules import ProbabilisticActor, ValueOperator

        self.layers = {part: network(policy, part) for part in ("actor", "critic")}
        self.actor = ProbabilisticActor(
            TensorDictModule(self.layers["actor"], in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        self.critic = ValueOperator(self.layers["critic"], in_keys=["observation"])
        following = batch.observation["observation"][1:].clone()
        following[batch.final_step, batch.final_slot] = batch.final_observation["observation"]
        after = {
            "observation": following.double(),
            "reward": batch.reward.double()[..., None],
            "done": (batch.terminated | batch.truncated)[..., None],
            "terminated": batch.terminated[..., None],
        }
        self.data = TensorDict(
            {
                "observation": batch.observation["observation"][:-1].double(),
                "action": batch.action["action"],
                "action_log_prob": batch.log_prob.double()[..., None],
                "next": {name: tensor.transpose(0, 1) for name, tensor in after.items()},
            },
            batch_size=[],
        )
        # TorchRL's order is column by column.
        for name in ("observation", "action", "action_log_prob"):
            self.data[name] = self.data[name].transpose(0, 1)
        self.data.batch_size = [batch.valid.shape[1], SHORT_STEPS]

    @torch.no_grad()
    def estimate(self, function: str, **numbers: float) -> None:
        from torchrl.objectives.value import functional

        data, after = self.data, self.data["next"]
        value, following = (self.layers["critic"](part["observation"]) for part in (data, after))
        ratio = {}
        if function == "vtrace_advantage_estimate":
            log_pi = self.actor.get_dist(data).log_prob(data["action"])[..., None]
            ratio = {"log_pi": log_pi, "log_mu": data["action_log_prob"]}
        data["advantage"], data["value_target"] = getattr(functional, function)(
            **numbers,
            **ratio,
            state_value=value,
            next_state_value=following,
            reward=after["reward"],
            done=after["done"],
            terminated=after["terminated"],
        )

    def loss(self) -> dict[str, float]:
        from torchrl.objectives import A2CLoss

        # Their squared error has no ½.
        numbers = {"entropy_coeff": ENTROPY, "critic_coeff": VALUE / 2}
        terms = A2CLoss(self.actor, self.critic, **numbers, loss_critic_type="l2", functional=False)(
            self.data
        )
        (terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]).backward()
        return {name: terms[name].item() for name in ("loss_objective", "loss_critic", "loss_entropy")}

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for part in self.layers.values() for parameter in part.parameters()]  # type: ignore[misc]


PLAIN: dict[str, Any] = {
    "discount": DISCOUNT, "entropy_coefficient": ENTROPY, "value_coefficient": VALUE,
    "max_gradient_norm": 0.0, "normalise_advantages": False,
}  # fmt: skip


VTRACE, GAE = "vtrace_advantage_estimate", "generalized_advantage_estimate"


@pytest.mark.parametrize(
    ("section", "function", "numbers"),
    [
        (ImpalaSection(rho_clip=1.0, c_clip=1.0, **PLAIN), VTRACE, {"rho_thresh": 1.0, "c_thresh": 1.0}),
        (ImpalaSection(rho_clip=1.25, c_clip=0.75, **PLAIN), VTRACE, {"rho_thresh": 1.25, "c_thresh": 0.75}),
        (ReinforceSection(advantage="monte-carlo", **PLAIN), GAE, {"lmbda": 1.0}),
        (ReinforceSection(advantage="gae", gae_lambda=TRACE, **PLAIN), GAE, {"lmbda": TRACE}),
    ],
    ids=["impala", "impala-other-clips", "reinforce-monte-carlo", "reinforce-gae"],
)
def test_impala_and_reinforce_have_the_losses_and_the_gradients_of_torchrls(
    section: ImpalaSection | ReinforceSection, function: str, numbers: dict[str, float]
) -> None:
    policy, acted = policies()
    batch = experience(acted, SHORT_STEPS)
    library = Library(policy, batch)
    library.estimate(function, gamma=DISCOUNT, **numbers)
    terms = library.loss()
    kinds: dict[type, Any] = {ImpalaSection: Impala, ReinforceSection: Reinforce}
    made = kinds[type(section)](policy, section, seed=0)
    metrics = made.update(batch, progress=0.0).metrics
    if function == VTRACE:
        assert metrics["max_ratio"] > 1.5
    assert metrics["policy_loss"] == pytest.approx(terms["loss_objective"], rel=1e-9)
    assert VALUE * metrics["value_loss"] == pytest.approx(terms["loss_critic"], rel=1e-9)
    assert -ENTROPY * metrics["entropy"] == pytest.approx(terms["loss_entropy"], rel=1e-9)
    named = named_gradients(made)
    ours = [named[f"{layer}.{kind}"] for layer in LAYERS for kind in ("weight", "bias")]
    for one, other in zip(ours, library.gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


def test_ppo_estimates_advantages_and_targets_as_torchrls_gae() -> None:
    policy, acted = policies()
    batch = experience(acted, SHORT_STEPS)
    library = Library(policy, batch)
    library.estimate("generalized_advantage_estimate", gamma=DISCOUNT, lmbda=TRACE)
    section = PPOSection(discount=DISCOUNT, gae_lambda=TRACE, normalise_advantages=False, objective="coupled")
    ppo = PPO(policy, section, seed=0)
    with torch.no_grad():
        rows = ppo.prepare(batch, batch.reward, RankGroup().rows_of(batch.valid)).rows
    for ours, theirs in ((rows.weighted_advantage, "advantage"), (rows.target, "value_target")):
        expected = library.data[theirs].squeeze(-1).transpose(0, 1).flatten()
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


ROWS, STORED = 64, 200
EPSILON, RATE, REPLAY_DISCOUNT = 1e-2, 3e-3, 0.97
OBSERVATION = box(3)
GRADIENT_STEPS = 3
"""Gradient steps: later ones see moments, targets and temperatures that are no longer the first."""


class Stand(gymnasium.Env[Any, Any]):
    def __init__(self, action: Any) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action


def theirs(kind: str, action: Any, **options: Any) -> Any:
    model = getattr(stable_baselines3, kind)(
        "MlpPolicy",
        Stand(action),
        learning_rate=RATE,
        buffer_size=STORED,
        batch_size=ROWS,
        gamma=REPLAY_DISCOUNT,
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
            discount=REPLAY_DISCOUNT * (1 - data.dones.squeeze(1)),
            following={"observation": data.next_observations},
        ),
        torch.arange(ROWS),
        torch.ones(ROWS),
    )


def linear(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def copy(source: nn.Module, target: list[nn.Linear]) -> None:
    for theirs_, ours in zip(linear(source), target, strict=True):
        ours.weight.copy_(theirs_.weight)
        ours.bias.copy_(theirs_.bias)


def assert_same(source: nn.Module, target: list[nn.Linear], start: list[Tensor]) -> None:
    for theirs_, ours, before in zip(linear(source), target, start, strict=True):
        for name in ("weight", "bias"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs_, name), rtol=1e-4, atol=1e-6)
        assert (theirs_.weight - before).abs().max() > 3e-5


@pytest.mark.parametrize("max_norm", [10.0, 0.3])
def test_dqn_learns_as_well_as_stable_baselines(max_norm: float) -> None:
    model = theirs("DQN", gymnasium.spaces.Discrete(2), max_grad_norm=max_norm)
    section = DQNSection(
        double=False,
        discount=REPLAY_DISCOUNT,
        learning_rate=RATE,
        adam_epsilon=EPSILON,
        max_gradient_norm=max_norm,
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
    for step in range(GRADIENT_STEPS):
        sample = next_sample(model, step, squashed=False)
        model.train(gradient_steps=1, batch_size=ROWS)
        stepped = ours.gradient_step(sample, RATE)
        told = model.logger.name_to_value["train/loss"]
        assert stepped.metrics["value_loss"].item() == pytest.approx(told, rel=1e-4)
        assert_same(model.q_net, layers, start)


@pytest.mark.parametrize("tuned", [True, False])
def test_sac_learns_as_well_as_stable_baselines(tuned: bool) -> None:
    model = theirs(
        "SAC", gymnasium.spaces.Box(-1, 1, (1,), np.float32), tau=0.05, ent_coef="auto_0.5" if tuned else 0.5
    )
    # It keeps tanh's slope away from 0 by adding 1e-6; ours is exact.
    model.actor.action_dist.epsilon = 0.0
    section = SACSection(
        discount=REPLAY_DISCOUNT, learning_rate=RATE, adam_epsilon=EPSILON, target_rate=0.05, temperature=0.5,
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
    its_networks = [*model.critic.q_networks, *model.critic_target.q_networks]
    for mine, its in zip([*critics, *followers], its_networks, strict=True):
        copy(its, mine)
    begun = [[layer.weight.clone() for layer in layers] for layers in (*critics, *followers)]
    for step in range(GRADIENT_STEPS):
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
        for its, mine, before in zip(its_networks, [*critics, *followers], begun, strict=True):
            assert_same(its, mine, before)
    if tuned:
        torch.testing.assert_close(ours._temperature.log, model.log_ent_coef, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def copy_actor(model: Any, ours: SAC) -> None:
    policy = ours.policy
    copy(model.actor.latent_pi, linear(policy.actor_body))
    policy.actor_head.weight.copy_(torch.cat([model.actor.mu.weight, model.actor.log_std.weight]))
    policy.actor_head.bias.copy_(torch.cat([model.actor.mu.bias, model.actor.log_std.bias]))


def assert_same_actor(model: Any, ours: SAC) -> None:
    policy, heads = ours.policy, (model.actor.mu, model.actor.log_std)
    for name in ("weight", "bias"):
        its = [getattr(one, name) for one in linear(model.actor.latent_pi)]
        its.append(torch.cat([getattr(head, name) for head in heads]))
        mine = [getattr(one, name) for one in (*linear(policy.actor_body), policy.actor_head)]
        for one, other in zip(mine, its, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
