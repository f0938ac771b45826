"""The exported model computes what the policy computes."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import PolicySection
from penstock.policy.build import build
from penstock.policy.layers import BatchNorm
from penstock.policy.policy import Policy
from penstock.wire.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, leaves
from penstock.wire.tensor import Array

pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

VECTOR = Box(np.full(4, -1, np.float32), np.full(4, 1, np.float32))
IMAGE = Box(np.zeros((12, 12, 3), np.uint8), np.full((12, 12, 3), 255, np.uint8))
MIXED = Dict(
    (
        ("bits", MultiBinary(3)),
        ("camera", IMAGE),
        ("choice", Discrete(4, start=1)),
        ("gears", MultiDiscrete((2, 3))),
        ("joints", VECTOR),
    )
)
CASES: dict[str, tuple[Space, Space, PolicySection]] = {
    "a vector and a choice": (VECTOR, Discrete(2), PolicySection()),
    "normalised, continuous, squashed": (
        VECTOR,
        Box(np.full(2, -2, np.float32), np.full(2, 2, np.float32)),
        PolicySection(normalise_observations=True, continuous="squashed", activation="silu"),
    ),
    "parts of every kind": (
        MIXED,
        Dict((("fire", Discrete(3)), ("steer", Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))))),
        PolicySection(normalise_observations=True, shared_trunk=True),
    ),
    "every kind of layer": (
        Dict((("camera", IMAGE), ("arm", VECTOR))),
        Discrete(2),
        PolicySection(hidden_norm="batch", dropout=0.2, image_trunk="impala", shared_trunk=True),
    ),
    "a network of the user's": (
        VECTOR,
        Discrete(2),
        PolicySection(network="tests.unit.penstock.policy.own_networks:Good", shared_trunk=True),
    ),
}


def observations(space: Space, rows: int) -> dict[str, Array]:
    """Values of every leaf within its space."""
    generator = np.random.default_rng(rows)
    found: dict[str, Array] = {}
    for path, leaf in leaves(space, "observation"):
        shape = (rows, *leaf.shape)
        if isinstance(leaf, Box) and leaf.dtype != "uint8":
            values: Any = generator.normal(scale=2.0, size=shape)
        elif isinstance(leaf, Discrete):
            values = generator.integers(leaf.start, leaf.start + leaf.n, shape)
        else:
            values = generator.integers(0, 2 if not isinstance(leaf, Box) else 256, shape)
        found[path] = values.astype(leaf.dtype)
    return found


def trained(space: Space, action: Space, section: PolicySection) -> Policy:
    """A policy whose weights and statistics are not those of the start."""
    policy = build(space, action, section, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if policy.normaliser is not None:
            policy.normaliser.mean.fill_(0.3)
            policy.normaliser.variance.fill_(2.5)
        for layer in policy.modules():
            if isinstance(layer, BatchNorm):
                layer.mean.fill_(0.2)
                layer.variance.fill_(0.5)
    return policy


@pytest.mark.parametrize("name", CASES)
def test_the_model_gives_the_parameters_and_values_of_the_policy(name: str) -> None:
    """For one row and for seven, from raw observations."""
    from penstock.policy.onnx_export import PARAMETERS, VALUE, input_names, to_onnx

    space, action, section = CASES[name]
    policy = trained(space, action, section)
    session = runtime.InferenceSession(to_onnx(policy, {"run": "a", "version": "7"}))
    assert [one.name for one in session.get_inputs()] == input_names(policy)
    for rows in (1, 7):
        observed = observations(space, rows)
        parameters, value = session.run([PARAMETERS, VALUE], observed)
        assert value.shape == (rows,)
        np.testing.assert_allclose(parameters, policy.action_parameters(observed), rtol=0, atol=5e-5)
        np.testing.assert_allclose(value, policy.values(observed), rtol=0, atol=5e-5)
    told = session.get_modelmeta().custom_metadata_map
    assert (told["run"], told["version"]) == ("a", "7")
    heads = json.loads(told["action"])
    assert [head["path"] for head in heads] == [path for path, _ in leaves(action, "action")]
    assert heads[-1]["start"] + heads[-1]["size"] == parameters.shape[1]


def test_exporting_leaves_the_policy_as_it_is() -> None:
    """Whichever its mode."""
    from penstock.policy.onnx_export import to_onnx

    policy = trained(*CASES["a vector and a choice"]).train()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    to_onnx(policy, {})
    assert policy.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("section", [{"recurrent": "gru"}, {"frame_stack": 2}], ids=str)
def test_a_policy_that_remembers_is_refused(section: dict[str, Any]) -> None:
    """With what it remembers, and what to do."""
    from penstock.policy.onnx_export import to_onnx

    policy = build(VECTOR, Discrete(2), PolicySection(**section), 0)
    with pytest.raises(ValueError, match=r"a policy that remembers \(state/.*export it as safetensors"):
        to_onnx(policy, {})
