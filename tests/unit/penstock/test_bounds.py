"""Actions stay within their Box whatever it is, and observations keep what float32 would round."""

from typing import Any, Final

import numpy as np
import pytest
import torch

from penstock.config.settings import ConfigurationError, PolicySection, SACSection
from penstock.learner.algorithms.off_policy.memory import Sample, Transitions
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.policy.acting.array_policy import ArrayPolicy
from penstock.policy.acting.drawing import GaussianDrawing, SquashedGaussianDrawing
from penstock.policy.networks import ImageEncoder
from penstock.policy.policy import build
from penstock.policy.weights import encode
from penstock.protocol.spaces import Box, Dict, Space, leaves

LARGEST: Final = float(np.finfo(np.float32).max)


def box(low: float, high: float, dtype: str = "float32", shape: tuple[int, ...] = (1,)) -> Box:
    return Box(np.full(shape, low, dtype), np.full(shape, high, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [GaussianDrawing, SquashedGaussianDrawing])
def test_no_action_leaves_its_box(kind: type[GaussianDrawing], dtype: str) -> None:
    random = np.random.default_rng(0)
    bounds = [(-1140.2659, -65.089035), (0.0, 0.001), (65.0, 1140.0), (-1.0, 1.0), (3.0, 3.0)]
    bounds += [tuple(sorted(pair)) for pair in random.normal(scale=1e3, size=(200, 2)).tolist()]
    for low, high in bounds:
        space = box(low, high, dtype)
        drawing = kind("action", space, 0.0)
        drawn: Any = np.concatenate([random.normal(scale=3.0, size=(50, 1)), [[-90.0], [90.0]]]).astype(dtype)
        action: Any = drawing.to_environment(drawn)
        assert action.dtype == dtype
        assert (action >= space.low).all()
        assert (action <= space.high).all()
        np.testing.assert_allclose(action[-2:].ravel(), [low, high], rtol=1e-6)


def test_a_gaussian_is_stretched_to_its_bounds_and_back() -> None:
    drawing = GaussianDrawing("action", box(65.0, 1140.0), 0.0)
    drawn = np.array([[-1.0], [0.0], [0.5], [1.0]], np.float32)
    action: Any = drawing.to_environment(drawn)
    assert action.ravel().tolist() == [65.0, 602.5, 871.25, 1140.0]
    again: Any = drawing.from_environment(action)
    np.testing.assert_allclose(again.tolist(), drawn.tolist(), atol=1e-6)
    half_open = GaussianDrawing("action", box(0.0, np.inf), 0.0)
    assert half_open.to_environment(np.array([[-2.0], [7.0]], np.float32)).ravel().tolist() == [0.0, 7.0]
    idiom = GaussianDrawing("action", box(-LARGEST, LARGEST), 0.0)
    assert idiom.to_environment(np.array([[-2.0]], np.float32)).ravel().tolist() == [-2.0]


def test_bounds_that_count_as_none_cannot_be_squashed_into() -> None:
    section = PolicySection(continuous="squashed")
    with pytest.raises((ConfigurationError, ValueError), match="set policy.continuous=clipped"):
        build(box(-1, 1), box(-LARGEST, LARGEST), section, 0)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_observations_are_centred_before_they_are_rounded(dtype: str) -> None:
    """What the network sees of 1e8 + {0, 1, 2, 3} is what it sees of {0, 1, 2, 3}."""
    section = PolicySection(normalise_observations=True, hidden_sizes=(8,))
    found = []
    for offset in (0, 10**8):
        space = Box(np.full(1, -(2**40), dtype), np.full(1, 2**40, dtype))
        policy = build(space, box(-1, 1), section, 0)
        rows: Any = (np.arange(4) + offset).astype(dtype)[:, None]
        policy.normaliser.merge(policy.normaliser.observe(torch.from_numpy(rows.astype(np.float64))))  # type: ignore[union-attr]
        seen = {"observation": torch.from_numpy(rows)}
        inputs = policy.read(seen).vector
        np.testing.assert_allclose(inputs.ravel(), [-1.3416, -0.4472, 0.4472, 1.3416], atol=1e-3)
        acting = ArrayPolicy(space, box(-1, 1), section, 0)
        acting.load(encode(policy))
        with torch.no_grad():
            torch_outputs = policy.outputs(policy.read(seen)).parameters
        np.testing.assert_allclose(acting.step({"observation": rows}).parameters, torch_outputs, atol=1e-5)
        found.append(torch_outputs)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_a_grid_of_bytes_is_divided_by_its_highest_value() -> None:
    grid = Box(np.zeros((7, 7, 3), np.uint8), np.full((7, 7, 3), 10, np.uint8))
    image = Box(np.zeros((7, 7, 3), np.uint8), np.full((7, 7, 3), 255, np.uint8))
    torch.manual_seed(0)
    of_grid = ImageEncoder("observation", grid, "auto")
    of_image = ImageEncoder("observation", image, "auto")
    of_image.load_state_dict(of_grid.state_dict())
    tens, full = (torch.full((1, 7, 7, 3), value, dtype=torch.uint8) for value in (10, 255))
    with torch.no_grad():
        assert torch.equal(of_grid(tens), of_image(full))
    flat = build(Box(np.zeros(3, np.uint8), np.full(3, 4, np.uint8)), box(-1, 1), PolicySection(), 0)
    assert flat.read({"observation": torch.tensor([[0, 2, 4]], dtype=torch.uint8)}).vector.tolist() == [
        [0, 0.5, 1]
    ]


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((84, 84, 4), False), ((4, 84, 84), True), ((210, 160, 3), False), ((3, 64, 96), True),
        ((8, 8, 17), False), ((17, 8, 8), True), ((8, 8, 111), False), ((1, 9, 9), True), ((9, 9, 1), False),
    ],
)  # fmt: skip
def test_the_channels_of_an_image_are_the_axis_that_is_least_like_the_others(
    shape: tuple[int, ...],
    first: bool,
) -> None:
    leaf = Box(np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8))
    assert ImageEncoder("observation", leaf, "auto").channels_first == first
    assert ImageEncoder("observation", leaf, "small", "channels_first").channels_first


def test_a_policy_is_float32_whatever_an_environment_has_set() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        policy = build(box(-1, 1), box(-1, 1), PolicySection(), 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {one.dtype for one in policy.parameters()} == {torch.float32}


# ---- The gradient step of SAC without a graph.


@pytest.mark.parametrize(
    ("action", "activation", "sizes", "section"),
    [
        (box(-1, 1, shape=(6,)), "relu", (64, 48), {}),
        (box(-2, 2, shape=(3,)), "tanh", (32, 32), {"critic_activation": "tanh"}),
        (Dict((("a", box(0, 1)), ("b", box(-1, 3, shape=(2,))))), "relu", (16,), {"max_gradient_norm": 0.5}),
        (box(-1, 1, shape=(2,)), "relu", (32, 32), {"tune_temperature": False}),
    ],
)
def test_a_dense_gradient_step_is_that_of_autograd(
    action: Space, activation: str, sizes: tuple[int, ...], section: dict[str, Any]
) -> None:
    settings = SACSection(batch_size=64, **section)
    observation = box(-9, 9, shape=(5,))

    def learner() -> SAC:
        policy = build(
            observation,
            action,
            settings.policy_section(PolicySection(hidden_sizes=sizes, activation=activation)),  # type: ignore[arg-type]
            0,
        )
        return SAC(policy.double(), settings, seed=0)

    dense, plain = learner(), learner()
    assert dense._chains is not None
    plain._chains = None
    random = np.random.default_rng(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape))

    for rows in (64, 64, 64, 7):
        transitions = Transitions(
            observation={"observation": normal(rows, 5)},
            action={path: normal(rows, *leaf.shape) for path, leaf in leaves(action, "action")},
            reward=normal(rows).float(),
            discount=torch.full((rows,), 0.99),
            following={"observation": normal(rows, 5)},
        )
        sample = Sample(transitions, torch.arange(rows), torch.rand(rows))
        stepped, expected = (one.gradient_step(sample, 1e-3) for one in (dense, plain))
        torch.testing.assert_close(stepped.errors, expected.errors, atol=1e-9, rtol=1e-7)
        for name, value in expected.metrics.items():
            torch.testing.assert_close(stepped.metrics[name], value, atol=1e-9, rtol=1e-7)
    for name, module in plain.modules.items():
        for own, other in zip(dense.modules[name].parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(own, other, atol=1e-9, rtol=1e-7)
