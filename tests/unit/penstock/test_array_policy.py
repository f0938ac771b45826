"""The policy without torch is the policy with torch: same weights in, same actions and probabilities out."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest
import torch

from penstock.config.settings import PolicySection
from penstock.policy import weights
from penstock.policy.acting.array_policy import ArrayPolicy, is_enough
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.acting_build import build_acting
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, leaves, sample
from penstock.protocol.tensor import Array

ROWS: Final = (1, 2, 33)


def box(*shape: int, dtype: str = "float32") -> Box:
    """Within −2 and 1."""
    return Box(np.full(shape, -2, dtype), np.full(shape, 1, dtype))


SEEN: Final = Tuple(
    (box(3), Discrete(4, start=2), MultiDiscrete((2, 3)), MultiBinary(2), box(2, dtype="float64"))
)
BYTES: Final = Tuple((Box(np.zeros(4, np.uint8), np.full(4, 255, np.uint8)), box(1)))
EVERY: Final = Tuple((Discrete(3, start=1), box(2), MultiDiscrete((2, 4)), MultiBinary(3)))
CASES: Final[dict[str, tuple[Space, Space, dict[str, Any]]]] = {
    "one choice": (box(4), Discrete(2), {}),
    "all kinds, separate trunks": (SEEN, EVERY, {"initial_log_std": -0.5}),
    "shared trunk, normalised": (SEEN, EVERY, {"shared_trunk": True, "normalise_observations": True}),
    "dropout between layers": (box(4), Discrete(3), {"dropout": 0.2, "activation": "relu"}),
    "no hidden layers, bytes": (BYTES, box(2), {"hidden_sizes": (), "normalise_observations": True}),
    "squashed": (box(2), box(2), {"continuous": "squashed", "activation": "silu"}),
    "deviations of the network": (
        box(2), box(3), {"continuous": "squashed", "state_dependent_std": True, "activation": "elu"}
    ),
    "action values, dueling": (box(2), Discrete(4), {"discrete": "epsilon_greedy", "dueling": True}),
}  # fmt: skip


def trained(case: str) -> Policy:
    """Return a policy whose weights are nothing like those that it was made with."""
    observation_space, action_space, section = CASES[case]
    policy = build(observation_space, action_space, PolicySection(**section), 3)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    if policy.normaliser is not None:
        policy.normaliser.mean.normal_(generator=random)
        policy.normaliser.variance.uniform_(0.2, 3.0, generator=random)
    return policy


def rows(space: Space, count: int) -> dict[str, Array]:
    """Observations that the space allows."""
    random = np.random.default_rng(count)
    return {path: sample(leaf, count, random) for path, leaf in leaves(space, "observation")}


def both(case: str) -> tuple[Policy, ArrayPolicy]:
    """The two, with the same weights, seed and exploration."""
    observation_space, action_space, section = CASES[case]
    policy = trained(case)
    arrays = build_acting(observation_space, action_space, PolicySection(**section), 3)
    assert isinstance(arrays, ArrayPolicy)
    arrays.load(weights.encode(policy))
    for one in (policy, arrays):
        one.seed_actions(11)
        one.explore({"epsilon": 0.4, "epsilon_spread": 2.0}, ExplorationSlots(1, 40))
    return policy, arrays


def assert_same(first: Mapping[str, Array], second: Mapping[str, Array]) -> None:
    """To the last bit."""
    assert first.keys() == second.keys()
    for path, array in first.items():
        np.testing.assert_array_equal(array, second[path])
        assert array.dtype == second[path].dtype


@pytest.mark.parametrize("case", CASES)
def test_it_draws_what_the_policy_draws(case: str) -> None:
    policy, arrays = both(case)
    for count in ROWS:
        seen = rows(CASES[case][0], count)
        for deterministic in (False, True):
            wanted, got = (one.act(seen, deterministic=deterministic) for one in (policy, arrays))
            assert_same(wanted.action, got.action)
            np.testing.assert_array_equal(wanted.log_prob, got.log_prob)
            assert got.state == {} == arrays.initial_state(count)
            for one, other in zip(
                leaves_of(policy.environment_action(wanted.action)),
                leaves_of(arrays.environment_action(got.action)),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other)


def leaves_of(action: Any) -> tuple[Any, ...]:
    """The parts of an environment's action."""
    return action if isinstance(action, tuple) else (action,)


@pytest.mark.parametrize("case", CASES)
def test_it_answers_the_probe_as_the_learner_does(case: str) -> None:
    policy, arrays = both(case)
    seen = rows(CASES[case][0], 33)
    action = arrays.act(seen).action
    np.testing.assert_allclose(
        arrays.acting_log_prob(seen, action), policy.log_prob(seen, action), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("case", CASES)
def test_what_it_drew_has_the_chance_that_it_named(case: str) -> None:
    _, arrays = both(case)
    seen = rows(CASES[case][0], 33)
    acted = arrays.act(seen)
    chance = arrays.chance(arrays.step(seen).parameters, acted.action)
    np.testing.assert_allclose(chance, acted.log_prob, rtol=1e-5, atol=1e-5)


def test_masks_hold_for_it() -> None:
    policy, arrays = both("all kinds, separate trunks")
    seen = rows(SEEN, 200)
    allowed = np.tile([True, False, True], (200, 1))
    seen["mask/action/0"] = allowed
    drawn, wanted = arrays.act(seen), policy.act(seen)
    assert_same(wanted.action, drawn.action)
    assert not (drawn.action["action/0"] == 1).any()
    answers = arrays.acting_log_prob(seen, drawn.action), policy.log_prob(seen, drawn.action)
    np.testing.assert_allclose(*answers, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_weights_of_another_policy_change_nothing(case: str) -> None:
    observation_space, _, section = CASES[case]
    policy, arrays = both(case)
    seen = rows(observation_space, 2)
    before = arrays.step(seen).parameters
    whole = weights.snapshot(policy)
    for name, array in whole.items():
        wrong = {**whole, name: array[..., None]}
        with pytest.raises(ValueError, match=rf"weights\.{name}: .* does not fit"):
            arrays.load(weights.encode(wrong))
        with pytest.raises(ValueError, match=rf"missing \['{name}'\]"):
            arrays.load(weights.encode({key: one for key, one in whole.items() if key != name}))
    with pytest.raises(ValueError, match=r"unknown \['more'\]"):
        arrays.load(weights.encode({**whole, "more": np.zeros(1, np.float32)}))
    np.testing.assert_array_equal(arrays.step(seen).parameters, before)
    assert is_enough(observation_space, PolicySection(**section))


def test_it_does_not_act_before_it_has_weights() -> None:
    arrays = ArrayPolicy(box(4), Discrete(2), PolicySection(), 0)
    with pytest.raises(RuntimeError, match="acts once weights are loaded"):
        arrays.act(rows(box(4), 1))


@pytest.mark.parametrize("number", [-1, 4])
def test_a_code_outside_its_space_is_refused(number: int) -> None:
    arrays = ArrayPolicy(Discrete(4), Discrete(2), PolicySection(), 0)
    arrays.load(weights.encode(build(Discrete(4), Discrete(2), PolicySection(), 0)))
    with pytest.raises(ValueError, match="observation: holds numbers"):
        arrays.act({"observation": np.array([number])})


PIXELS: Final = Box(np.zeros((8, 8), np.uint8), np.full((8, 8), 255, np.uint8))


@pytest.mark.parametrize(
    ("space", "section"),
    [
        (PIXELS, {}),
        (box(4), {"hidden_norm": "layer"}),
        (box(4), {"hidden_norm": "batch"}),
        (box(4), {"recurrent": "lstm"}),
        (box(4), {"frame_stack": 2}),
    ],
)
def test_torch_acts_for_other_networks(space: Space, section: dict[str, Any]) -> None:
    acting = build_acting(space, Discrete(2), PolicySection(**section), 0)
    assert isinstance(acting, Policy)
    acting.load(weights.encode(build(space, Discrete(2), PolicySection(**section), 1)))
