"""What a policy server asks of a policy beyond acting.

Draws with its own generator, masks, distributions, values.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import distributions as torch_distributions

from penstock.config.settings import PolicySection
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.distributions import (
    ActionHead,
    Bernoulli,
    Categorical,
    ConditionalSquashedGaussian,
    EpsilonGreedy,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Space
from tests.support.experience.experience import box

WIDE: Final = box(3, low=-2.0, high=6.0)
HEADS: Final[dict[str, Callable[[], ActionHead]]] = {
    "categorical": lambda: Categorical("action", Discrete(5)),
    "categorical from -2": lambda: Categorical("action", Discrete(5, start=-2)),
    "multi-categorical": lambda: MultiCategorical("action", MultiDiscrete((2, 4, 3))),
    "bernoulli": lambda: Bernoulli("action", MultiBinary(4)),
    "gaussian": lambda: Gaussian("action", WIDE, -0.4),
    "squashed": lambda: SquashedGaussian("action", WIDE, -0.4),
}
ACTION: Final[Space] = Dict((
    ("move", Discrete(4)), ("many", MultiDiscrete((2, 3))), ("bits", MultiBinary(2)), ("force", WIDE),
))  # fmt: skip
ROWS: Final = 200


def parameters(head: ActionHead) -> Any:
    """Outputs of a network, float32 [ROWS, size]."""
    return np.random.default_rng(1).normal(size=(ROWS, head.size)).astype(np.float32)


def policy_of(action: Space = ACTION, **section: Any) -> Policy:
    """Four numbers in; outputs that differ from row to row."""
    made = build(box(4), action, PolicySection(**({"hidden_sizes": (16, 16)} | section)), 0)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(made.actor_head.weight, std=0.5, generator=generator)
    return made


def observed(rows: int = ROWS) -> dict[str, Any]:
    """Observations by path."""
    return {"observation": np.random.default_rng(2).normal(size=(rows, 4)).astype(np.float32)}


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize("name", HEADS)
def test_an_action_of_the_environment_is_the_one_that_was_drawn(name: str) -> None:
    head = HEADS[name]()
    drawn: Any = head.draw(parameters(head), np.random.default_rng(3))[0]
    if name == "gaussian":
        drawn = np.clip(drawn, -2, 6)  # what is clipped on its way cannot be known
    again: Any = head.from_environment(head.to_environment(drawn))
    assert again.dtype == drawn.dtype
    np.testing.assert_allclose(again, drawn, atol=1e-3 if name == "squashed" else 0)


@pytest.mark.parametrize(
    ("name", "action", "said"),
    [
        ("categorical", [5], r"action=\[5\]: must lie in 0..4"),
        ("categorical from -2", [3], r"must lie in -2..2"),
        ("categorical from -2", [-3], r"must lie in -2..2"),
        ("multi-categorical", [[0, 4, 0]], "must lie in 0..3"),
        ("bernoulli", [[0, 1, 2, 0]], "bits are 0 or 1"),
        ("squashed", [[6.0, 0.0, 0.0]], "inside its bounds"),
        ("squashed", [[0.0, -2.0, 0.0]], "inside its bounds"),
        ("squashed", [[0.0, np.nan, 0.0]], "inside its bounds"),
    ],
)
def test_an_action_that_cannot_be_drawn_is_refused(name: str, action: Any, said: str) -> None:
    head = HEADS[name]()
    with pytest.raises(ValueError, match=said):
        head.from_environment(np.asarray(action, head.action_dtype))


@pytest.mark.parametrize("name", HEADS)
def test_the_distribution_described_is_the_one_of_torch(name: str) -> None:
    head = HEADS[name]()
    given = parameters(head)
    described = {key: torch.from_numpy(np.array(array)) for key, array in head.describe(given).items()}
    drawn: Any = head.draw(given, np.random.default_rng(4))[0]
    action = torch.from_numpy(drawn)
    match name:
        case "multi-categorical":
            parts = zip(described["probability"].split([2, 4, 3], -1), action.unbind(-1), strict=True)
            each = [torch_distributions.Categorical(probs=p).log_prob(a) for p, a in parts]
            expected = torch.stack(each).sum(0)
        case "bernoulli":
            bits = torch_distributions.Bernoulli(probs=described["probability"])
            expected = bits.log_prob(action.float()).sum(-1)
        case "gaussian" | "squashed":
            normal = torch_distributions.Normal(described["mean"], described["std"])
            expected = normal.log_prob(action).sum(-1)
            if name == "squashed":
                tanh = torch_distributions.TanhTransform()
                expected -= tanh.log_abs_det_jacobian(action, action.tanh()).sum(-1)
        case _:
            expected = torch_distributions.Categorical(probs=described["probability"]).log_prob(action)
    own = head.log_prob(torch.from_numpy(given), action)
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*HEADS, "squashed, conditional", "epsilon-greedy"])
def test_the_chance_of_an_action_is_that_of_its_draw(name: str) -> None:
    if name == "epsilon-greedy":
        head: ActionHead = EpsilonGreedy("action", Discrete(5))
        head.explore({"epsilon": 0.4}, ExplorationSlots())
    elif name == "squashed, conditional":
        head = ConditionalSquashedGaussian("action", WIDE, -0.4)
    else:
        head = HEADS[name]()
    given = parameters(head)
    drawn, log_prob = head.draw(given, np.random.default_rng(4))
    drawn.setflags(write=False)
    np.testing.assert_allclose(head.chance(given, drawn), log_prob, atol=1e-4)


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


def test_a_mask_is_torchs_categorical_without_the_rest() -> None:
    head = Categorical("action", Discrete(5))
    allowed = np.random.default_rng(5).random((ROWS, 5)) < 0.5
    allowed[np.arange(ROWS), np.random.default_rng(6).integers(5, size=ROWS)] = True
    given = parameters(head) * 50
    masked = head.masked(given, allowed)
    left = torch.from_numpy(given).masked_fill(torch.from_numpy(~allowed), -torch.inf)
    expected = torch_distributions.Categorical(logits=left)
    share: Any = head.describe(masked)["probability"]
    assert (share[~allowed] == 0).all()
    np.testing.assert_allclose(share, expected.probs.numpy(), atol=1e-6)
    drawn, log_p = head.draw(masked, np.random.default_rng(7))
    np.testing.assert_allclose(log_p, expected.log_prob(torch.from_numpy(drawn)), atol=1e-4)
    assert allowed[np.arange(ROWS), drawn.astype(np.int64)].all()


@pytest.mark.parametrize("name", [name for name in HEADS if "categorical" not in name])
def test_only_choices_take_a_mask(name: str) -> None:
    head = HEADS[name]()
    with pytest.raises(ValueError, match="only a choice of one of n takes an action mask"):
        head.masked(parameters(head), np.ones((ROWS, head.size), bool))


def test_a_mask_that_allows_nothing_is_refused() -> None:
    allowed = np.ones((ROWS, 5), bool)
    allowed[7] = False
    head = Categorical("action", Discrete(5))
    with pytest.raises(ValueError, match="allows nothing"):
        head.masked(parameters(head), allowed)


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize("continuous", ["clipped", "squashed"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_chosen_is_as_likely_as_the_learner_says(continuous: str, deterministic: bool) -> None:
    policy = policy_of(continuous=continuous)
    outputs = policy.step(observed()).parameters
    acted = policy.choose(outputs, np.random.default_rng(0), deterministic=deterministic)
    np.testing.assert_allclose(acted.log_prob, policy.log_prob(observed(), acted.action), atol=1e-4)


def test_acting_is_choosing_with_the_policys_own_generator() -> None:
    policy = policy_of()
    policy.seed_actions(5)
    acted = policy.act(observed())
    chosen = policy.choose(policy.step(observed()).parameters, np.random.default_rng(5))
    for name, action in acted.action.items():
        np.testing.assert_array_equal(chosen.action[name], action)
    np.testing.assert_array_equal(chosen.log_prob, acted.log_prob)


def test_a_mask_holds_for_its_leaf_alone() -> None:
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


def test_a_distribution_names_every_leaf() -> None:
    described = policy_of().distribution(policy_of().step(observed(3)).parameters)
    assert {name: array.shape for name, array in described.items()} == {
        "action/move/probability": (3, 4),
        "action/many/probability": (3, 5),
        "action/bits/probability": (3, 2),
        "action/force/mean": (3, 3),
        "action/force/std": (3, 3),
    }


@pytest.mark.parametrize("shared", [False, True])
def test_values_are_the_critics(shared: bool) -> None:
    policy = policy_of(shared_trunk=shared, normalise_observations=True)
    values = policy.values(observed())
    tensors = {name: torch.from_numpy(array) for name, array in observed().items()}
    expected = policy.outputs(policy.read(tensors)).value.detach().numpy()
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_choose_nothing(wrong: float) -> None:
    policy = policy_of()
    outputs = policy.step(observed()).parameters.copy()
    outputs[3, 1] = wrong
    with pytest.raises(FloatingPointError, match="not finite"):
        policy.choose(outputs, np.random.default_rng(0))
