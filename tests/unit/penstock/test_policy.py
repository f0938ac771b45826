import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

from penstock.config.settings import PolicySection
from penstock.policy import weights
from penstock.policy.acting.acting_policy import Step
from penstock.policy.acting.array_policy import MAX_HEADER_BYTES, ArrayPolicy, NumpyNormaliser
from penstock.policy.acting_build import build_acting
from penstock.policy.networks import Normaliser, moments
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, leaves
from tests.support.experience.experience import box, image, observations, small_policy
from tests.support.run.forked_process import ForkedProcess

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
    observation, action, section = CASES[name]
    return build(observation, action, PolicySection(**({"hidden_sizes": (16,)} | section)), seed)


@pytest.mark.parametrize("name", CASES)
def test_acting_and_evaluating_agree(name: str) -> None:
    policy = make(name)
    seen = observations(policy.observation_space, 12)
    acted = policy.act(seen)
    expected = {path: (leaf.dtype, (12, *leaf.shape)) for path, leaf in leaves(policy.action_space, "action")}
    assert {path: (a.dtype.name, a.shape) for path, a in acted.action.items()} == expected
    assert acted.log_prob.dtype == np.float32
    np.testing.assert_allclose(policy.log_prob(seen, acted.action), acted.log_prob, atol=2e-5)
    np.testing.assert_allclose(policy.acting_log_prob(seen, acted.action), acted.log_prob, atol=2e-5)
    tables = (
        {path: torch.from_numpy(one).unflatten(0, (3, 4)) for path, one in rows.items()}
        for rows in (seen, acted.action)
    )
    result = policy.evaluate(*tables)
    for tensor in (result.log_prob, result.entropy, result.value):
        assert tensor.shape == (3, 4)
        assert torch.isfinite(tensor).all()
    np.testing.assert_allclose(result.log_prob.detach().flatten(), acted.log_prob, atol=2e-5)


def test_the_probe_is_answered_by_the_pass_that_acts() -> None:
    policy = make("normalised")
    seen = observations(policy.observation_space, 4)
    acted = policy.act(seen)
    # What `act` reads is made once: break it behind torch's back.
    policy.__dict__["step"] = lambda _: Step(np.full((4, 2), [9.0, -9.0], np.float32), {})
    broken = policy.act(seen, deterministic=True)
    np.testing.assert_allclose(policy.acting_log_prob(seen, broken.action), broken.log_prob, atol=1e-6)
    assert not np.allclose(policy.acting_log_prob(seen, acted.action), policy.log_prob(seen, acted.action))


def test_new_weights_are_used_from_the_next_call_on() -> None:
    policy, other = make("vector", 0), make("vector", 1)
    seen = observations(policy.observation_space, 32)
    policy.act(seen)
    weights.load_into(policy, weights.encode(other))
    expected = other.act(seen, deterministic=True).log_prob
    np.testing.assert_array_equal(policy.act(seen, deterministic=True).log_prob, expected)
    policy.double()
    np.testing.assert_allclose(policy.act(seen, deterministic=True).log_prob, expected, atol=1e-6)


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


@pytest.mark.parametrize(
    ("empty", "said"),
    [
        (Dict(()), "observation_space=.*holds nothing; a policy must see something"),
        (Tuple(()), "observation_space=.*holds nothing; a policy must see something"),
        (Dict((("a", box(2)), ("b", box(0)))), r"'observation/b'.*Box.*MultiDiscrete"),
    ],
)
def test_an_empty_observation_is_refused_by_name(empty: Space, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(empty, Discrete(2), PolicySection(), 0)


@pytest.mark.parametrize("leaf", [Discrete(10**12), MultiDiscrete((4, 2**31)), MultiBinary(2**20 + 1)])
def test_more_codes_than_a_network_takes_are_refused_before_making_it(leaf: Space) -> None:
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


FORCE: Final = box(3, low=-2.0, high=6.0)
ACTION: Final[Space] = Dict((
    ("move", Discrete(4)), ("many", MultiDiscrete((2, 3))), ("bits", MultiBinary(2)), ("force", FORCE),
))  # fmt: skip
ROWS: Final = 200


def policy_of(action: Space = ACTION, **section: Any) -> Policy:
    made = build(box(4), action, PolicySection(**({"hidden_sizes": (16, 16)} | section)), 0)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(made.actor_head.weight, std=0.5, generator=generator)
    return made


def observed(rows: int = ROWS) -> dict[str, Any]:
    return {"observation": np.random.default_rng(2).normal(size=(rows, 4)).astype(np.float32)}


def test_the_chance_of_an_action_under_a_mask_is_that_of_its_draw() -> None:
    policy, random = policy_of(), np.random.default_rng(8)
    masks = {
        "action/move": np.array([[True, False, True, False]] * ROWS),
        "action/many": np.array([[True, True, False, True, False]] * ROWS),
    }
    given = policy.step(observed()).parameters
    acted = policy.choose(given, random, masks=masks)
    np.testing.assert_allclose(policy.chance(given, acted.action, masks), acted.log_prob, atol=1e-4)
    assert (policy.chance(given, acted.action) < acted.log_prob - 1e-3).any()
    with pytest.raises(FloatingPointError, match="not finite"):
        policy.chance(np.full_like(given, np.nan), acted.action)


def test_acting_equals_choosing_with_the_policys_generator() -> None:
    policy = policy_of()
    policy.seed_actions(5)
    acted = policy.act(observed())
    chosen = policy.choose(policy.step(observed()).parameters, np.random.default_rng(5))
    for name, action in acted.action.items():
        np.testing.assert_array_equal(chosen.action[name], action)
    np.testing.assert_array_equal(chosen.log_prob, acted.log_prob)


def test_a_mask_applies_only_to_its_leaf() -> None:
    policy = policy_of(Dict((("a", Discrete(4)), ("b", Discrete(3)))))
    outputs = policy.step(observed()).parameters
    masks = {"action/a": np.tile([True, False, True, False], (ROWS, 1))}
    chosen = policy.choose(outputs, np.random.default_rng(0), masks=masks)
    free = policy.choose(outputs, np.random.default_rng(0))
    np.testing.assert_array_equal(chosen.action["action/b"], free.action["action/b"])
    described = policy.distribution(outputs, masks)
    rows = np.arange(ROWS)
    shares = [
        described[f"action/{leaf}/probability"][rows, chosen.action[f"action/{leaf}"].astype(np.int64)]
        for leaf in "ab"
    ]
    np.testing.assert_allclose(chosen.log_prob, np.log(shares[0] * shares[1]), atol=1e-5)
    plain = policy.distribution(outputs)
    np.testing.assert_array_equal(described["action/b/probability"], plain["action/b/probability"])


@pytest.mark.parametrize("shared", [False, True])
def test_values_come_from_the_critic(shared: bool) -> None:
    policy = policy_of(shared_trunk=shared, normalise_observations=True)
    values = policy.values(observed())
    tensors = {name: torch.from_numpy(array) for name, array in observed().items()}
    expected = policy.outputs(policy.read(tensors)).value.detach().numpy()
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_non_finite_parameters_choose_nothing(wrong: float) -> None:
    policy = policy_of()
    outputs = policy.step(observed()).parameters.copy()
    outputs[3, 1] = wrong
    with pytest.raises(FloatingPointError, match="not finite"):
        policy.choose(outputs, np.random.default_rng(0))


def rows(count: int = 1000) -> torch.Tensor:
    """Far from 0 and of unequal scale: what a naive sum of squares gets wrong."""
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return 1e6 + noise * torch.tensor([1e-2, 1.0, 1e3])


def test_statistics_do_not_depend_on_how_rows_are_grouped() -> None:
    data = rows()
    for sizes in ([1000], [1] * 1000, [7, 493, 500]):
        normaliser = Normaliser(3, 10.0)
        for group in data.split(sizes):
            normaliser.merge(moments(group))
        assert normaliser.count.item() == 1000
        np.testing.assert_allclose(normaliser.mean, data.mean(0), rtol=1e-12)
        np.testing.assert_allclose(normaliser.variance, data.var(0, correction=0), rtol=1e-8)


def test_normalised_rows_have_mean_zero_and_variance_one_once_some_were_merged() -> None:
    normaliser = Normaliser(3, 2.0)
    data = torch.tensor([[1.0, -3.0, 50.0]])
    torch.testing.assert_close(normaliser(data), torch.tensor([[1.0, -2.0, 2.0]]))
    normaliser.merge(moments(rows()))
    result = normaliser(rows())
    assert result.mean(0).abs().max() < 0.05
    assert result.abs().max() == 2.0


def test_numpy_rounds_like_torch() -> None:
    normaliser = Normaliser(3, 10.0)
    fast = NumpyNormaliser(normaliser.mean.numpy(), normaliser.variance.numpy(), normaliser.clip)
    normaliser.merge(moments(rows()))
    for dtype in (torch.float32, torch.float64):
        data = rows().to(dtype)
        np.testing.assert_allclose(fast(data.numpy()), normaliser(data).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.promise("extreme-observation-space-permits")
def test_one_extreme_row_does_not_spoil_normalisation() -> None:
    normaliser = Normaliser(3, 10.0)
    normaliser.merge(normaliser.observe(rows()))
    before = normaliser.variance.clone()
    np.testing.assert_array_equal(normaliser.observe(rows()).spread, moments(rows()).spread)
    normaliser.merge(normaliser.observe(torch.full((1, 3), 9e8, dtype=torch.float64)))
    # 100² of one row in 1,001, and the variance of the others.
    assert (normaliser.variance / before).max() < 12
    assert not normaliser.observe(torch.tensor([[torch.nan, torch.inf, 0.0]])).checksum().isfinite()


def test_statistics_follow_a_lasting_change_of_scale() -> None:
    normaliser = Normaliser(1, 10.0)
    still = torch.zeros((100_000, 1), dtype=torch.float64)
    moving = 1e5 * torch.randn(2048, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    normaliser.merge(normaliser.observe(still))
    for _ in range(10):
        normaliser.merge(normaliser.observe(moving))
    assert normaliser.variance.sqrt().item() > 2e4


def blob_of(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_a_blob_restores_every_parameter_and_buffer() -> None:
    first, second = small_policy(0, normalise_observations=True), small_policy(1, normalise_observations=True)
    blob = weights.encode(first)
    assert blob != weights.encode(second)
    weights.load_into(second, blob)
    assert weights.encode(second) == blob
    assert weights.sha256(blob) == weights.sha256(weights.encode(first))
    assert second.normaliser is not None
    assert second.normaliser.mean.dtype == torch.float64


def test_a_snapshot_does_not_follow_later_updates() -> None:
    policy = small_policy()
    blob, taken = weights.encode(policy), weights.snapshot(policy)
    with torch.no_grad():
        policy.actor_head.bias.add_(1.0)
    assert weights.encode(taken) == blob != weights.encode(policy)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "0 bytes"),
        (b"short", "5 bytes"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * 64, "header of 262145"),
        ((1 << 63).to_bytes(8, "little"), "header of"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{not json", "not a whole safetensors"),
        (blob_of({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8), "not a whole"),
        (
            blob_of({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 4]}}, b"\0" * 4),
            "not a whole",
        ),
        (blob_of({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4), "not a whole"),
        (b"\x80\x04pickle!" * 4, "header of"),
    ],
)
def test_bytes_that_are_not_a_blob_are_refused(blob: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights.decode(blob)


def test_a_truncated_blob_is_refused() -> None:
    blob = weights.encode(small_policy())
    for length in range(0, len(blob), 97):
        with pytest.raises(ValueError, match="weights"):
            weights.decode(blob[:length])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": None}, r"missing \['bias'\]"),
        ({"extra": np.zeros(1, np.float32)}, r"unknown \['extra'\]"),
        ({"weight": np.zeros((2, 3), np.float32)}, r"weights.weight.*\(2, 3\) does not fit.*\(3, 2\)"),
        ({"weight": np.zeros((3, 2), np.float64)}, r"weights.weight.*float64.*does not fit"),
    ],
)
def test_weights_of_another_module_change_nothing(change: dict[str, Any], message: str) -> None:
    module = nn.Linear(2, 3)
    before = weights.encode(module)
    changed = {name: one for name, one in (weights.snapshot(module) | change).items() if one is not None}
    with pytest.raises(ValueError, match=message):
        weights.load_into(module, weights.encode(changed))
    assert weights.encode(module) == before


CODES: Final = Tuple((box(3), Discrete(4, start=2)))
EVERY: Final = Tuple((Discrete(3, start=1), box(2), MultiDiscrete((2, 4)), MultiBinary(3)))


def with_and_without_torch() -> tuple[Policy, ArrayPolicy]:
    section = PolicySection(normalise_observations=True)
    policy, arrays = build(CODES, EVERY, section, 3), build_acting(CODES, EVERY, section, 3)
    assert isinstance(arrays, ArrayPolicy)
    torch.nn.init.normal_(policy.actor_head.weight, generator=torch.Generator().manual_seed(5))
    arrays.load(weights.encode(policy))
    for one in (policy, arrays):
        one.seed_actions(11)
    return policy, arrays


def test_masks_hold_without_torch_as_with_it() -> None:
    policy, arrays = with_and_without_torch()
    seen = observations(CODES, 200)
    seen["mask/action/0"] = np.tile([True, False, True], (200, 1))
    drawn, wanted = arrays.act(seen), policy.act(seen)
    for path, array in wanted.action.items():
        np.testing.assert_array_equal(array, drawn.action[path])
    assert not (drawn.action["action/0"] == 1).any()
    answers = arrays.acting_log_prob(seen, drawn.action), policy.log_prob(seen, drawn.action)
    np.testing.assert_allclose(*answers, rtol=2e-5, atol=2e-5)


def test_weights_of_another_policy_change_nothing() -> None:
    policy, arrays = with_and_without_torch()
    seen = observations(CODES, 2)
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


def test_it_acts_once_it_has_weights_on_codes_of_its_space() -> None:
    arrays = ArrayPolicy(Discrete(4), Discrete(2), PolicySection(), 0)
    with pytest.raises(RuntimeError, match="acts once weights are loaded"):
        arrays.act({"observation": np.array([1])})
    arrays.load(weights.encode(build(Discrete(4), Discrete(2), PolicySection(), 0)))
    for number in (-1, 4):
        with pytest.raises(ValueError, match="observation: holds numbers"):
            arrays.act({"observation": np.array([number])})


@pytest.mark.parametrize(
    ("space", "section"),
    [
        (image(8, 8), {}),
        (box(4), {"hidden_norm": "layer"}),
        (box(4), {"hidden_norm": "batch"}),
        (box(4), {"recurrent": "lstm"}),
        (box(4), {"frame_stack": 2}),
    ],
)
def test_other_networks_act_with_torch(space: Space, section: dict[str, Any]) -> None:
    acting = build_acting(space, Discrete(2), PolicySection(**section), 0)
    assert isinstance(acting, Policy)
    acting.load(weights.encode(build(space, Discrete(2), PolicySection(**section), 1)))
