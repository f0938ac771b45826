"""Advantages, losses and gradients against TorchRL, on the same experience and weights, in float64.

TorchRL is called where its users call it: its functions estimate advantages from the values of its critic,
and `A2CLoss` with those is its IMPALA (and, with λ = 1, its REINFORCE). Its module `VTrace` is not used: it
draws another action for log π than the one that was taken.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.config.settings import ImpalaSection, PPOSection, ReinforceSection
from penstock.learner.algorithms.ppo import PPO, Impala, OnPolicy, Reinforce
from penstock.learner.batch import Batch, assemble
from penstock.policy.policy import Policy
from tests.support.experience.experience import Collector, cartpoles, small_policy

STEPS = 24
# TorchRL keeps its numbers in float32; these lose nothing there.
DISCOUNT, TRACE, ENTROPY, VALUE = 31 / 32, 7 / 8, 1 / 64, 1 / 2


def experience(behaviour: Policy) -> Batch:
    """Four columns of CartPole with episodes that fall and others that a time limit of 15 steps cuts."""
    collectors = [Collector(cartpoles(2, max_episode_steps=15), session) for session in (1, 2)]
    batch = assemble([c.fragment(behaviour, STEPS) for c in collectors], torch.device("cpu"))
    assert bool(batch.terminated.any()), "no episode fell"
    assert bool(batch.truncated.any()), "no episode was cut"
    return batch


def policies() -> tuple[Policy, Policy]:
    """One that learns and a different one that acted."""
    learns, acted = small_policy(1), small_policy(2)
    with torch.no_grad():
        # Away from the uniform start, so that ratios are above and below 1.
        learns.actor_head.weight.mul_(1000)
        acted.actor_head.weight.mul_(100)
    return learns.double(), acted


def network(policy: Policy, part: str) -> nn.Sequential:
    """The actor's or the critic's layers with the same weights, as torch's own modules."""
    state = policy.state_dict()
    layers: list[nn.Module] = []
    for name in (f"{part}_body.layers.0", f"{part}_body.layers.2", f"{part}_head"):
        weight = state[f"{name}.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        linear.load_state_dict({"weight": weight, "bias": state[f"{name}.bias"]})
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Library:
    """TorchRL's actor, critic and tensordict for a policy of ours and a batch."""

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
        self.data.batch_size = [batch.valid.shape[1], STEPS]

    @torch.no_grad()
    def estimate(self, function: str, **numbers: float) -> None:
        """Advantages and targets by a function of `torchrl.objectives.value.functional`."""
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

    def loss(self, *, entropy: float, critic: float) -> dict[str, float]:
        """Terms of `A2CLoss`; leaves the gradients of their sum in the layers."""
        from torchrl.objectives import A2CLoss

        module = A2CLoss(
            self.actor,
            self.critic,
            entropy_coeff=entropy,
            critic_coeff=critic,
            loss_critic_type="l2",
            functional=False,
        )
        terms = module(self.data)
        total = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
        total.backward()
        return {name: terms[name].item() for name in ("loss_objective", "loss_critic", "loss_entropy")}

    def gradients(self) -> list[Tensor]:
        """Weights and biases of the actor, then the critic, first layer first."""
        return [parameter.grad for part in self.layers.values() for parameter in part.parameters()]  # type: ignore[misc]


def gradients(algorithm: OnPolicy[Any]) -> list[Tensor]:
    """Ours, in the same order, as the optimiser last had them."""
    optimiser = algorithm._optimiser
    named = dict(zip(optimiser._names, optimiser.gradient_views, strict=True))
    layers = ("body.layers.0", "body.layers.2", "head")
    return [
        named[f"{part}_{layer}.{kind}"]
        for part in ("actor", "critic")
        for layer in layers
        for kind in ("weight", "bias")
    ]


PLAIN: dict[str, Any] = {
    "discount": DISCOUNT, "entropy_coefficient": ENTROPY, "value_coefficient": VALUE,
    "max_gradient_norm": 0.0, "normalise_advantages": False,
}  # fmt: skip


@pytest.mark.parametrize(("rho_clip", "c_clip"), [(1.0, 1.0), (1.25, 0.75)])
def test_impala_has_the_loss_and_the_gradients_of_torchrls(rho_clip: float, c_clip: float) -> None:
    policy, acted = policies()
    batch = experience(acted)
    library = Library(policy, batch)
    library.estimate("vtrace_advantage_estimate", gamma=DISCOUNT, rho_thresh=rho_clip, c_thresh=c_clip)
    # Their squared error has no ½.
    terms = library.loss(entropy=ENTROPY, critic=VALUE / 2)
    impala = Impala(policy, ImpalaSection(rho_clip=rho_clip, c_clip=c_clip, **PLAIN), seed=0)
    update = impala.update(batch, progress=0.0)
    assert update.metrics["max_ratio"] > 1.5
    assert update.metrics["policy_loss"] == pytest.approx(terms["loss_objective"], rel=1e-9)
    assert VALUE * update.metrics["value_loss"] == pytest.approx(terms["loss_critic"], rel=1e-9)
    assert -ENTROPY * update.metrics["entropy"] == pytest.approx(terms["loss_entropy"], rel=1e-9)
    for ours, theirs in zip(gradients(impala), library.gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    ("section", "trace"),
    [({"advantage": "monte-carlo"}, 1.0), ({"advantage": "gae", "gae_lambda": TRACE}, TRACE)],
    ids=["monte-carlo", "gae"],
)
def test_reinforce_has_the_loss_and_the_gradients_of_torchrls(section: dict[str, Any], trace: float) -> None:
    policy, acted = policies()
    batch = experience(acted)
    library = Library(policy, batch)
    library.estimate("generalized_advantage_estimate", gamma=DISCOUNT, lmbda=trace)
    terms = library.loss(entropy=ENTROPY, critic=VALUE / 2)
    reinforce = Reinforce(policy, ReinforceSection(**section, **PLAIN), seed=0)
    update = reinforce.update(batch, progress=0.0)
    assert update.metrics["policy_loss"] == pytest.approx(terms["loss_objective"], rel=1e-9)
    assert VALUE * update.metrics["value_loss"] == pytest.approx(terms["loss_critic"], rel=1e-9)
    for ours, theirs in zip(gradients(reinforce), library.gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_ppo_estimates_advantages_and_targets_as_torchrls_gae() -> None:
    policy, acted = policies()
    batch = experience(acted)
    library = Library(policy, batch)
    library.estimate("generalized_advantage_estimate", gamma=DISCOUNT, lmbda=TRACE)
    section = PPOSection(discount=DISCOUNT, gae_lambda=TRACE, normalise_advantages=False, objective="coupled")
    ppo = PPO(policy, section, seed=0)
    rows = prepared_rows(ppo, batch)
    for ours, theirs in ((rows.weighted_advantage, "advantage"), (rows.target, "value_target")):
        expected = library.data[theirs].squeeze(-1).transpose(0, 1).flatten()
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def prepared_rows(ppo: PPO, batch: Batch) -> Any:
    """What the epochs of an update of this batch would begin with."""
    from penstock.learner.algorithms.rows import RankGroup

    with torch.no_grad():
        return ppo.prepare(batch, batch.reward, RankGroup().rows_of(batch.valid)).rows
