"""The exported model acts as the policy acts."""

import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import PolicySection
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Box, Discrete, leaves
from tests.support.serving.exported_policies import CASES, VECTOR, deterministic, masks, observations, trained

pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")

from penstock.policy.onnx_export import PARAMETERS, VALUE, input_names, to_onnx

runtime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

FAST = ("normalised, continuous, squashed", "parts of every kind")
"""Exporting takes seconds, so the others are slow."""
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@functools.cache
def exported(name: str) -> tuple[Policy, Any]:
    """A policy and a session of its model, made once: exporting takes seconds."""
    policy = trained(*CASES[name])
    return policy, runtime.InferenceSession(to_onnx(policy, {"run": "a", "version": "7"}))


@pytest.mark.parametrize("name", NAMES)
def test_the_model_gives_the_parameters_and_values_of_the_policy(name: str) -> None:
    (space, action, _), (policy, session) = CASES[name], exported(name)
    assert [one.name for one in session.get_inputs()] == input_names(policy)
    for rows in (1, 7):
        observed = observations(space, rows)
        parameters, value = session.run([PARAMETERS, VALUE], observed)
        assert value.shape == (rows,)
        wanted = policy.step(observed).parameters
        if policy.combines_heads:  # they act by advantages, which differ from values by a number for each row
            parameters, wanted = (one - one.mean(-1, keepdims=True) for one in (parameters, wanted))
        np.testing.assert_allclose(parameters, wanted, rtol=0, atol=5e-5)
        np.testing.assert_allclose(value, policy.values(observed), rtol=0, atol=5e-5)
    told = session.get_modelmeta().custom_metadata_map
    assert (told["run"], told["version"]) == ("a", "7")
    heads = json.loads(told["action"])
    assert [head["path"] for head in heads] == [path for path, _ in leaves(action, "action")]
    assert heads[-1]["start"] + heads[-1]["size"] == parameters.shape[1]


@pytest.mark.promise("exported-model-acts-policy")
@pytest.mark.parametrize("name", NAMES)
def test_the_model_acts_as_the_policy_does(name: str) -> None:
    space, (policy, session) = CASES[name][0], exported(name)
    observed = observations(space, 33)
    expected = deterministic(policy, observed)
    found = session.run([f"mode/{path}" for path in expected], observed)
    for (path, wanted), mode in zip(expected.items(), found, strict=True):
        assert (mode.dtype, mode.shape) == (wanted.dtype, wanted.shape), path
        np.testing.assert_allclose(mode, wanted, rtol=0, atol=5e-5)


@pytest.mark.promise("exported-model-acts-policy")
@pytest.mark.parametrize(
    "name",
    [
        "a vector and a choice",
        pytest.param("choices", marks=pytest.mark.slow),
        pytest.param("values of choices", marks=pytest.mark.slow),
        pytest.param("parts of every kind", marks=pytest.mark.slow),
    ],
)
def test_masks_are_inputs_of_a_run_that_has_some(name: str) -> None:
    space, action, section = CASES[name]
    policy = trained(space, action, section)
    allowed = masks(action, 33)
    session = runtime.InferenceSession(to_onnx(policy, {}, masks=list(allowed)))
    rows = {**observations(space, 33), **allowed}
    assert {one.name for one in session.get_inputs()} == rows.keys()
    free = deterministic(policy, observations(space, 33))
    for path, wanted in deterministic(policy, rows).items():
        (mode,) = session.run([f"mode/{path}"], rows)
        np.testing.assert_allclose(mode, wanted, rtol=0, atol=5e-5)
        if f"mask/{path}" in allowed:
            assert not np.array_equal(mode, free[path]), "the masks forbid some of what is best"


@pytest.mark.parametrize("name", NAMES)
def test_an_action_can_be_drawn_from_outputs_and_metadata(name: str) -> None:
    (space, action, _), (policy, session) = CASES[name], exported(name)
    observed = observations(space, 5)
    described = policy.distribution(policy.step(observed).parameters)
    told = session.get_modelmeta().custom_metadata_map
    for head, (path, leaf) in zip(json.loads(told["action"]), leaves(action, "action"), strict=True):
        assert head["space"]["type"] == type(leaf).__name__
        assert head["act"]
        if isinstance(leaf, Box):
            mean, log_std = session.run([f"mean/{path}", f"log_std/{path}"], observed)
            assert mean.shape == log_std.shape == (5, *leaf.shape)
            np.testing.assert_allclose(mean.reshape(5, -1), described[f"{path}/mean"], atol=5e-5)
            np.testing.assert_allclose(np.exp(log_std).reshape(5, -1), described[f"{path}/std"], rtol=1e-4)
            for name_, bound in (("low", leaf.low), ("high", leaf.high)):
                finite = [float(one) if math.isfinite(one) else None for one in bound.flatten()]
                assert head["space"][name_] == finite
        elif head["kind"] == "EpsilonGreedy":
            (values,) = session.run([f"values/{path}"], observed)
            assert values.shape == (5, head["space"]["n"])
        else:
            (logits,) = session.run([f"logits/{path}"], observed)
            probability = described[f"{path}/probability"]
            if head["kind"] == "Bernoulli":
                np.testing.assert_allclose(1 / (1 + np.exp(-logits)), probability, atol=5e-5)
            for start, n in parts(head["space"]):
                share = np.exp(logits[:, start : start + n])
                share /= share.sum(-1, keepdims=True)
                np.testing.assert_allclose(share, probability[:, start : start + n], atol=5e-5)


def parts(space: dict[str, Any]) -> list[tuple[int, int]]:
    """Beginning and length of each choice's logits."""
    found = {"Discrete": [space.get("n")], "MultiDiscrete": space.get("nvec")}.get(space["type"])
    sizes: list[Any] = found or []
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def test_exporting_leaves_the_policy_unchanged() -> None:
    policy = trained(*CASES["a vector and a choice"]).train()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    to_onnx(policy, {})
    assert policy.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.promise("exported-model-acts-policy")
@pytest.mark.parametrize("section", [{"recurrent": "gru"}, {"frame_stack": 2}], ids=str)
def test_a_policy_that_remembers_is_refused(section: dict[str, Any]) -> None:
    policy = build(VECTOR, Discrete(2), PolicySection(**section), 0)
    with pytest.raises(ValueError, match=r"a policy that remembers \(state/.*export it as safetensors"):
        to_onnx(policy, {})
