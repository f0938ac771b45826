"""The learner against a plain PPO that shares no code with it."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.settings import PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import assemble
from penstock.policy.policy import Policy
from tests.learning.plain_ppo import PlainPPO, PlainSettings
from tests.support.experience.experience import Collector, cartpoles, small_policy

UPDATES, STEPS = 20, 16

CASES: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "coupled": {"objective": "coupled"},
    "vtrace": {"advantage": "vtrace", "normalise_advantages": False},
    "every-term": {"entropy_coefficient": 0.01, "value_clip": 0.2, "minibatches": 3},
}


def layers(policy: Policy, part: str) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of the actor or the critic, first layer first."""
    state = policy.state_dict()
    names = [f"{part}_body.layers.0", f"{part}_body.layers.2", f"{part}_head"]
    return [(state[f"{name}.weight"].clone(), state[f"{name}.bias"].clone()) for name in names]


def plain_settings(section: PPOSection) -> PlainSettings:
    """The same numbers under the oracle's names."""
    return PlainSettings(
        discount=section.discount,
        trace=section.gae_lambda,
        epsilon=section.clip_range,
        learning_rate=section.learning_rate,
        adam_epsilon=section.adam_epsilon,
        value_coefficient=section.value_coefficient,
        entropy_coefficient=section.entropy_coefficient,
        value_clip=section.value_clip,
        max_norm=section.max_gradient_norm,
        weight_cap=section.behaviour_weight_cap,
        minibatches=section.minibatches,
        normalise_advantages=section.normalise_advantages,
        decoupled=section.objective == "decoupled",
        vtrace=section.advantage == "vtrace",
    )


def permutations(ppo: PPO, count: int) -> list[Tensor]:
    """Those that the next update will draw, from a copy of its generator."""
    generator = torch.Generator()
    generator.set_state(ppo.state().tensors["generator/permutations"])
    return [torch.randperm(count, generator=generator) for _ in range(ppo.section.epochs)]


@pytest.mark.promise("twenty-updates-give-parameters")
@pytest.mark.parametrize("normalise", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("name", CASES)
def test_twenty_updates_give_the_parameters_of_a_plain_ppo(name: str, *, normalise: bool) -> None:
    section = PPOSection(learning_rate=1e-3, **CASES[name])
    policy = small_policy(3, normalise_observations=normalise).double()
    plain = PlainPPO(layers(policy, "actor"), layers(policy, "critic"), plain_settings(section))
    if normalise:
        plain.normalise_observations()
    ppo = PPO(policy, section, seed=5)
    collectors = [Collector(cartpoles(3, max_episode_steps=30), session) for session in (1, 2)]
    late = collectors[0].fragment(policy, STEPS)
    for _ in range(UPDATES):
        # One of the two fragments is one update behind.
        fragments = [late, collectors[1].fragment(policy, STEPS)]
        late = collectors[0].fragment(policy, STEPS)
        batch = assemble(fragments, torch.device("cpu"))
        order = permutations(ppo, batch.valid.numel())
        plain.update([arrays for _, arrays in fragments], order)
        assert ppo.update(batch, progress=0.0).applied
    for part, network in (("actor", plain.actor), ("critic", plain.critic)):
        expected = [p.detach() for p in network.parameters()]
        found = [tensor for pair in layers(policy, part) for tensor in pair]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.promise("twenty-updates-give-parameters")
def test_the_oracle_shares_no_code() -> None:
    tree = ast.parse((Path(__file__).parent / "plain_ppo.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert not any(str(name).split(".")[0] in {"learner", "penstock"} for name in imported)
