from typing import Any, Final

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.rows import RankGroup, see
from penstock.policy import weights
from penstock.policy.acting.array_policy import ArrayPolicy, is_enough
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple, leaves, sample
from tests.support.experience.remembering import Actor, batch_of, remembering

SETTLED: Final = {"network", "network_arguments", "kwargs", "image_trunk", "hidden_norm", "frame_stack"} | {
    "image_axes", "recurrent", "recurrent_size", "burn_in"
}  # fmt: skip
"""Settings of networks that torch acts for, which are left as they are."""
DRAWN: Final[dict[str, st.SearchStrategy[Any]]] = {
    "hidden_sizes": st.lists(st.integers(1, 9), max_size=3).map(tuple),
    "activation": st.sampled_from(["tanh", "relu", "elu", "silu"]),
    "dropout": st.sampled_from([0.0, 0.3]),
    "initialisation": st.sampled_from(["orthogonal", "xavier"]),
    "shared_trunk": st.booleans(),
    "normalise_observations": st.booleans(),
    "observation_clip": st.sampled_from([0.5, 10.0]),
    "continuous": st.sampled_from(["clipped", "squashed"]),
    "initial_log_std": st.floats(-2, 1),
    "state_dependent_std": st.booleans(),
    "discrete": st.sampled_from(["categorical", "epsilon_greedy"]),
    "dueling": st.booleans(),
}
boxes = st.builds(
    lambda shape, dtype: Box(np.full(shape, -2, dtype), np.full(shape, 1, dtype)),
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.sampled_from(["float32", "float64"]),
)
codes = (
    st.builds(Discrete, st.integers(1, 5), st.integers(-3, 3))
    | st.builds(MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    | st.builds(MultiBinary, st.integers(1, 4))
)
bytes_ = st.integers(1, 4).map(lambda n: Box(np.zeros(n, np.uint8), np.full(n, 255, np.uint8)))
actions = st.lists(boxes | codes, min_size=1, max_size=3).map(lambda parts: Tuple(tuple(parts)))
observations = st.lists(boxes | bytes_ | codes, min_size=1, max_size=3).map(lambda parts: Tuple(tuple(parts)))


def trained(observation: Tuple, action: Tuple, section: PolicySection, seed: int) -> Policy:
    """A policy whose weights and statistics are nothing like those that it was made with."""
    policy = build(observation, action, section, seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    if policy.normaliser is not None:
        policy.normaliser.mean.normal_(generator=random)
        policy.normaliser.variance.uniform_(0.2, 3.0, generator=random)
    return policy


def test_every_setting_of_the_section_is_drawn_or_fixed() -> None:
    assert DRAWN.keys() | SETTLED == PolicySection.model_fields.keys()


@settings(max_examples=60)
@given(
    observation=observations,
    action=actions,
    rows=st.sampled_from([1, 2, 33]),
    drawn=st.fixed_dictionaries(DRAWN),
    seed=st.integers(0, 999),
    deterministic=st.booleans(),
)
def test_an_acting_policy_acts_as_the_module_and_answers_the_probe_as_the_learner(
    observation: Tuple, action: Tuple, rows: int, drawn: dict[str, Any], seed: int, deterministic: bool
) -> None:
    section = PolicySection(**drawn)
    assert is_enough(observation, section)
    policy = trained(observation, action, section, seed)
    arrays = ArrayPolicy(observation, action, section, seed)
    arrays.load(weights.encode(policy))
    random = np.random.default_rng(seed)
    seen = {path: sample(leaf, rows, random) for path, leaf in leaves(observation, "observation")}
    for one in (policy, arrays):
        one.seed_actions(seed)
        one.explore({"epsilon": 0.4, "epsilon_spread": 2.0}, ExplorationSlots(1, 40))
    wanted, got = (one.act(seen, deterministic=deterministic) for one in (policy, arrays))
    assert wanted.action.keys() == got.action.keys()
    for path, array in wanted.action.items():
        np.testing.assert_array_equal(array, got.action[path])
        assert array.dtype == got.action[path].dtype
    for one, other in zip(
        *(each.environment_action(wanted.action) for each in (policy, arrays)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(wanted.log_prob, got.log_prob)
    if not deterministic:
        chance = arrays.chance(arrays.step(seen).parameters, got.action)
        np.testing.assert_allclose(chance, got.log_prob, rtol=1e-4, atol=1e-4)
    answer, learners = arrays.acting_log_prob(seen, got.action), policy.log_prob(seen, got.action)
    np.testing.assert_allclose(answer, learners, rtol=2e-5, atol=2e-5)


POLICIES: dict[str, dict[str, Any]] = {
    "lstm": {"recurrent": "lstm"},
    "gru of a shared trunk": {"recurrent": "gru", "shared_trunk": True},
    "stack": {"frame_stack": 3},
    "stack before an lstm, normalised": {
        "frame_stack": 2,
        "recurrent": "lstm",
        "normalise_observations": True,
    },
}
UNROLL = 8


@pytest.mark.parametrize("section", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("mode", AutoresetMode)
@settings(max_examples=6)
@given(
    cuts=st.lists(st.integers(1, UNROLL), min_size=1, max_size=4),
    longest=st.integers(1, 12),
    seed=st.integers(0, 999),
    masked=st.booleans(),
    burn_in=st.integers(0, 3),
)
def test_recorded_log_probabilities_equal_the_learners(
    section: dict[str, Any],
    mode: AutoresetMode,
    cuts: list[int],
    longest: int,
    seed: int,
    masked: bool,
    burn_in: int,
) -> None:
    recurrent = {"burn_in": burn_in} if "recurrent" in section else {}
    policy = remembering(seed, **section, **recurrent)
    actor = Actor(policy, mode=mode, longest=longest, unroll=UNROLL, seed=seed, masked=masked)
    batch = batch_of([actor.fragment(steps) for steps in cuts])
    ppo = PPO(policy, PPOSection(), seed=0)
    with torch.no_grad():
        look = see(policy, batch)
        parameters = policy.outputs(look.inputs).parameters[: batch.valid.numel()]
        found = policy.joint_log_prob(parameters, {"action": batch.action["action"].flatten()})
        same = torch.isclose(found.view_as(batch.log_prob), batch.log_prob, rtol=1e-4, atol=1e-4)
        assert same[batch.valid].all()
        prepared = ppo.prepare(batch, batch.reward, RankGroup().rows_of(batch.valid))
        rows = prepared.rows
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        sizes = prepared.rank_rows.split(order, 3)[1] if len(rows) else []
        for part in rows.select(order).cut(sizes) if len(rows) else ():
            outputs = ppo._network.outputs(part.inputs)
            again = policy.joint_log_prob(outputs.parameters, part.action)
            torch.testing.assert_close(again, part.behaviour, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(again, part.proximal, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(outputs.value, part.old_value, rtol=1e-5, atol=1e-5)
