"""The policy over every kind of space: acting, evaluating, initialising."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import PolicySection
from penstock.policy import weights
from penstock.policy.acting.acting_policy import Step
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, leaves
from penstock.protocol.tensor import Array
from tests.support.experience.experience import box, small_policy
from tests.support.run.forked_process import ForkedProcess


def image(*shape: int) -> Box:
    """A uint8 Box."""
    return Box(np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8))


MIXED = Dict(
    (("camera", image(40, 40, 3)), ("code", Discrete(4, 2)), ("bits", MultiBinary(3)), ("arm", box(2)))
)
PAIR = Tuple((Discrete(3, 5), box(2), MultiDiscrete((2, 4)), MultiBinary(2)))

CASES: dict[str, tuple[Space, Space, dict[str, Any]]] = {
    "vector": (box(4), Discrete(2), {}),
    "normalised": (box(4), Discrete(2), {"normalise_observations": True}),
    "continuous": (box(2, 3), box(3), {"activation": "relu"}),
    "squashed": (box(5), box(2), {"continuous": "squashed", "activation": "elu"}),
    "scalar": (box(), Discrete(2), {"activation": "silu"}),
    "bytes": (image(12), Discrete(2), {}),
    "one-hot": (Tuple((Discrete(4), MultiDiscrete((2, 3)))), Discrete(2), {}),
    "no-hidden": (box(4), Discrete(2), {"hidden_sizes": ()}),
    "shared": (box(4), PAIR, {"shared_trunk": True}),
    "small-image": (image(3, 10, 8), Discrete(2), {"shared_trunk": True}),
    "grey-image": (image(40, 36), Discrete(2), {}),
    "mixed": (MIXED, PAIR, {"normalise_observations": True}),
}


def make(name: str, seed: int = 0) -> Policy:
    """A policy of one of the cases."""
    observation, action, section = CASES[name]
    return build(observation, action, PolicySection(**({"hidden_sizes": (16,)} | section)), seed)


def observations(space: Space, *lead: int) -> dict[str, Array]:
    """Random values of a space."""
    random = np.random.default_rng(0)
    result: dict[str, Array] = {}
    for path, leaf in leaves(space, "observation"):
        shape = (*lead, *leaf.shape)
        match leaf:
            case Box(dtype="uint8"):
                result[path] = random.integers(0, 256, shape).astype(np.uint8)
            case Box():
                result[path] = random.standard_normal(shape).astype(leaf.dtype)
            case Discrete():
                result[path] = random.integers(leaf.start, leaf.start + leaf.n, shape)
            case MultiDiscrete():
                result[path] = random.integers(0, np.array(leaf.nvec), shape)
            case MultiBinary():
                result[path] = random.integers(0, 2, shape).astype(np.int8)
    return result


@pytest.mark.parametrize("name", CASES)
def test_acting_and_evaluating_agree(name: str) -> None:
    policy = make(name)
    seen = observations(policy.observation_space, 7)
    acted = policy.act(seen)
    expected = {path: (leaf.dtype, (7, *leaf.shape)) for path, leaf in leaves(policy.action_space, "action")}
    assert {path: (a.dtype.name, a.shape) for path, a in acted.action.items()} == expected
    assert acted.log_prob.dtype == np.float32
    np.testing.assert_allclose(policy.log_prob(seen, acted.action), acted.log_prob, atol=2e-5)
    np.testing.assert_allclose(policy.acting_log_prob(seen, acted.action), acted.log_prob, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_evaluating_keeps_leading_axes(name: str) -> None:
    policy = make(name)
    seen = {k: torch.from_numpy(v) for k, v in observations(policy.observation_space, 3, 4).items()}
    flat = policy.act({k: v.flatten(0, 1).numpy() for k, v in seen.items()}).action
    done = {k: torch.from_numpy(v).unflatten(0, (3, 4)) for k, v in flat.items()}
    result = policy.evaluate(seen, done)
    for tensor in (result.log_prob, result.entropy, result.value):
        assert tensor.shape == (3, 4)
        assert torch.isfinite(tensor).all()
    torch.testing.assert_close(policy.value(seen), result.value)


def test_the_probe_is_answered_by_the_pass_that_acts() -> None:
    policy = make("normalised")
    seen = observations(policy.observation_space, 4)
    acted = policy.act(seen)
    # What `act` reads is made once: break it behind torch's back.
    policy.__dict__["step"] = lambda _: Step(np.full((4, 2), [9.0, -9.0], np.float32), {})
    broken = policy.act(seen, deterministic=True)
    np.testing.assert_allclose(policy.acting_log_prob(seen, broken.action), broken.log_prob, atol=1e-6)
    assert not np.allclose(policy.acting_log_prob(seen, acted.action), policy.log_prob(seen, acted.action))


def test_numpy_and_torch_forwards_agree_after_a_merge() -> None:
    policy = make("normalised")
    rows = 3.0 + 2.0 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    before = policy.act({"observation": rows.numpy()}, deterministic=True)
    from penstock.policy.networks import moments

    assert policy.normaliser is not None
    policy.normaliser.merge(moments(rows))
    acted = policy.act({"observation": rows.numpy()}, deterministic=True)
    assert not np.array_equal(before.log_prob, acted.log_prob)
    np.testing.assert_allclose(
        policy.log_prob({"observation": rows.numpy()}, acted.action), acted.log_prob, atol=1e-6
    )


def test_new_weights_are_used_from_the_next_call_on() -> None:
    policy, other = make("vector", 0), make("vector", 1)
    seen = observations(policy.observation_space, 32)
    policy.act(seen)
    weights.load_into(policy, weights.encode(other))
    expected = other.act(seen, deterministic=True).log_prob
    np.testing.assert_array_equal(policy.act(seen, deterministic=True).log_prob, expected)
    policy.double()
    np.testing.assert_allclose(policy.act(seen, deterministic=True).log_prob, expected, atol=1e-6)


def test_seeds_decide_weights_and_actions() -> None:
    assert weights.encode(make("mixed", 4)) == weights.encode(make("mixed", 4))
    assert weights.encode(make("mixed", 4)) != weights.encode(make("mixed", 5))
    policy, seen = make("vector"), observations(box(4), 64)
    drawn = []
    for seed in (1, 1, 2):
        policy.seed_actions(seed)
        drawn.append(policy.act(seen).action["action"].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_initialisation_is_orthogonal_with_the_usual_gains() -> None:
    policy = small_policy()
    hidden, last = policy.actor_body.get_parameter("layers.2.weight"), policy.actor_head.weight
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(2), atol=1e-8, rtol=0)
    assert policy.critic_head.weight.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert all(not bias.any() for name, bias in policy.named_parameters() if name.endswith("bias"))


def test_initialisation_by_inputs_and_outputs() -> None:
    policy = small_policy(initialisation="xavier", hidden_sizes=(64, 64))
    for name, weight in policy.named_parameters():
        if weight.dim() < 2:
            assert not weight.any(), name
            continue
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound < weight.abs().max().item() <= bound, name
    hidden = policy.get_parameter("actor_body.layers.2.weight")
    assert hidden.std().item() == pytest.approx((2 / 128) ** 0.5, rel=0.05)
    assert not torch.equal(hidden, policy.get_parameter("critic_body.layers.2.weight"))
    again = small_policy(initialisation="xavier", hidden_sizes=(64, 64))
    assert torch.equal(hidden, again.get_parameter("actor_body.layers.2.weight"))


def test_environment_action_has_the_nesting_of_the_space() -> None:
    policy = make("shared")
    acted = policy.act(observations(box(4), 6))
    chosen, moved, choices, bits = policy.environment_action(acted.action)
    assert set(chosen) <= {5, 6, 7}
    assert (np.abs(moved) <= 1).all()
    assert choices.shape == bits.shape == (6, 2)


def test_outputs_that_are_not_finite_are_an_error() -> None:
    policy = small_policy()
    with torch.no_grad():
        policy.actor_head.bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        policy.act({"observation": np.zeros((2, 4), np.float32)})


def test_an_empty_observation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'observation/b'.*Box.*MultiDiscrete"):
        build(Dict((("a", box(2)), ("b", box(0)))), Discrete(2), PolicySection(), 0)


@pytest.mark.parametrize("empty", [Dict(()), Tuple(())])
def test_an_observation_of_no_parts_is_refused(empty: Space) -> None:
    with pytest.raises(ValueError, match="observation_space=.*holds nothing; a policy must see something"):
        build(empty, Discrete(2), PolicySection(), 0)


@pytest.mark.parametrize("leaf", [Discrete(10**12), MultiDiscrete((4, 2**31)), MultiBinary(2**20 + 1)])
def test_more_codes_than_a_network_takes_are_refused_before_it_is_made(leaf: Space) -> None:
    message = r"_space at '{}': .* codes, a network takes 1048576 at most; give it in several parts"
    with pytest.raises(ValueError, match=f"observation{message.format('observation/b')}"):
        build(Dict((("a", box(2)), ("b", leaf))), Discrete(2), PolicySection(), 0)
    with pytest.raises(ValueError, match=f"action{message.format('action')}"):
        build(box(2), leaf, PolicySection(), 0)


def test_importing_the_policy_stays_light(tmp_path: Path) -> None:
    heavy = "{'torch._dynamo', 'torch._inductor', 'torch.distributions', 'sympy', 'gymnasium'}"
    code = (
        "import sys, torch; before = set(sys.modules); import penstock.policy.policy, "
        f"penstock.policy.weights; print(sorted((set(sys.modules) - before) & {heavy}))"
    )
    said = tmp_path / "said.txt"
    assert ForkedProcess(code, output=said).wait(120) == 0, said.read_text()
    assert said.read_text().strip() == "[]"
