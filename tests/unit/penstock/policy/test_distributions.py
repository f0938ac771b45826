"""Action heads against torch.distributions, and the actor's half against the learner's."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, distributions

from penstock.config.settings import PolicySection
from penstock.policy.distributions import (
    ActionHead,
    Bernoulli,
    Categorical,
    ConditionalSquashedGaussian,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    head_of,
)
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete
from tests.support.experience.experience import box

LOG_STD = -0.4
WIDE = box(3, low=-2.0, high=6.0)

HEADS: dict[str, Callable[[], ActionHead]] = {
    "categorical": lambda: Categorical("action", Discrete(5)),
    "multi-categorical": lambda: MultiCategorical("action", MultiDiscrete((2, 4, 3))),
    "bernoulli": lambda: Bernoulli("action", MultiBinary(4)),
    "gaussian": lambda: Gaussian("action", WIDE, LOG_STD),
    "squashed": lambda: SquashedGaussian("action", WIDE, LOG_STD),
    "squashed, conditional": lambda: ConditionalSquashedGaussian("action", WIDE, LOG_STD),
}


def parameters(head: ActionHead, rows: int = 64) -> Tensor:
    """Outputs of a network, [rows, size]."""
    return torch.randn(rows, head.size, generator=torch.Generator().manual_seed(1))


def reference_log_prob(name: str, params: Tensor, action: Tensor) -> Tensor:
    """What torch.distributions says."""
    match name:
        case "categorical":
            expected: Tensor = distributions.Categorical(logits=params).log_prob(action)
        case "multi-categorical":
            parts = zip(params.split([2, 4, 3], -1), action.unbind(-1), strict=True)
            each = (distributions.Categorical(logits=p).log_prob(a) for p, a in parts)
            expected = sum(each, torch.zeros(()))
        case "bernoulli":
            expected = distributions.Bernoulli(logits=params).log_prob(action.float()).sum(-1)
        case "gaussian":
            expected = _normal(params).log_prob(action).sum(-1)
        case _:
            normal = _conditional(params) if name == "squashed, conditional" else _normal(params)
            # By the slope at the action as drawn: the tanh of a wide one is 1, from which there is no way
            # back.
            slope = distributions.TanhTransform().log_abs_det_jacobian(action, action.tanh())
            expected = (normal.log_prob(action) - slope).sum(-1)
    return expected


def _normal(params: Tensor) -> distributions.Normal:
    return distributions.Normal(params, torch.full_like(params, LOG_STD).exp())


def _conditional(params: Tensor) -> distributions.Normal:
    mean, log_std = params.chunk(2, -1)
    return distributions.Normal(mean, (log_std + LOG_STD).clamp(-20, 2).exp())


@pytest.mark.parametrize("name", HEADS)
def test_drawn_actions_have_the_log_probability_that_torch_gives(name: str) -> None:
    head = HEADS[name]()
    params = parameters(head)
    action, drawn = head.draw(params.numpy(), np.random.default_rng(0))
    stored = torch.from_numpy(np.asarray(action))
    assert action.dtype == head.action_dtype
    evaluated = head.log_prob(params, stored).detach()
    torch.testing.assert_close(evaluated, torch.from_numpy(drawn), atol=2e-5, rtol=1e-5)
    expected = reference_log_prob(name, params, stored)
    torch.testing.assert_close(evaluated, expected, atol=2e-4 if "squashed" in name else 2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_entropy_is_the_mean_of_minus_log_probability(name: str) -> None:
    head = HEADS[name]()
    row = parameters(head, 1)
    _, drawn = head.draw(row.numpy().repeat(200_000, 0), np.random.default_rng(2))
    assert head.entropy(row).item() == pytest.approx(-drawn.mean(), abs=0.02)


@pytest.mark.parametrize("name", HEADS)
def test_mode_is_more_likely_than_what_is_drawn(name: str) -> None:
    head = HEADS[name]()
    params = parameters(head)
    action, log_prob = head.mode(params.numpy())
    evaluated = head.log_prob(params, torch.from_numpy(np.asarray(action))).detach()
    torch.testing.assert_close(evaluated, torch.from_numpy(log_prob), atol=2e-5, rtol=1e-5)
    _, drawn = head.draw(params.numpy(), np.random.default_rng(3))
    if "squashed" not in name:
        assert (log_prob >= drawn - 1e-5).all()


def test_categorical_draws_follow_their_probabilities() -> None:
    head = Categorical("action", Discrete(3))
    logits = np.log(np.array([[0.2, 0.5, 0.3]], np.float32)).repeat(100_000, 0)
    action, _ = head.draw(logits, np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(action) / len(action), [0.2, 0.5, 0.3], atol=0.01)


@pytest.mark.parametrize("forbidden", [[], [0, 3]])
def test_a_single_row_is_drawn_as_one_of_many(forbidden: list[int]) -> None:
    head, logits = Categorical("action", Discrete(5)), np.random.default_rng(1).normal(size=(300, 5)) * 4
    logits[:, forbidden] = -np.inf
    expected = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    for seed, row in enumerate(logits.astype(np.float32)):
        drawn, log_prob = head.draw(row[None], np.random.default_rng(seed))
        noise = np.random.default_rng(seed).standard_exponential((1, 5), dtype=np.float32)
        assert drawn.tolist() == (row - np.log(noise)).argmax(-1).tolist()
        assert (drawn.dtype.name, log_prob.dtype.name) == ("int64", "float32")
        np.testing.assert_allclose(log_prob, expected[seed, drawn], atol=1e-6)


def test_environment_gets_actions_within_bounds() -> None:
    assert Categorical("action", Discrete(3, 5)).to_environment(np.array([0, 2])).tolist() == [5, 7]
    far = np.array([[-9.0, 0.0, 9.0]], np.float32)
    assert Gaussian("action", WIDE, 0.0).to_environment(far).tolist() == [[-2.0, 0.0, 6.0]]
    stretched = SquashedGaussian("action", WIDE, 0.0).to_environment(far)
    np.testing.assert_allclose(stretched.astype(np.float64), [[-2.0, 2.0, 6.0]], atol=1e-5)
    assert stretched.dtype == np.float32


@pytest.mark.parametrize(
    ("leaf", "continuous", "message"),
    [
        (Box(np.zeros(2, np.int32), np.ones(2, np.int32)), "clipped", "Discrete or MultiDiscrete"),
        (box(0), "clipped", "at least one float"),
        (box(2, high=np.inf), "squashed", "set policy.continuous=clipped"),
    ],
)
def test_a_space_that_cannot_be_drawn_from_is_refused(leaf: Leaf, continuous: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"'action/0'.*Box.*{message}"):
        head_of("action/0", leaf, PolicySection.model_validate({"continuous": continuous}))
