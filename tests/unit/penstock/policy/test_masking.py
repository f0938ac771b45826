"""What a mask forbids has no probability, and what is learned of the rest stays finite."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.settings import PolicySection
from penstock.policy.networks import masked
from penstock.policy.policy import Policy, build
from penstock.protocol.schema import mask_rules
from penstock.protocol.spaces import Discrete, MultiDiscrete, Space, Tuple
from tests.support.experience.experience import box

ROWS = 64


def made(action: Space) -> tuple[Policy, dict[str, Any]]:
    """A policy in float64 and rows of it with random masks."""
    policy = build(box(4), action, PolicySection(hidden_sizes=(8,)), 0).double()
    with torch.no_grad():
        policy.actor_head.weight.mul_(500)
    random = np.random.default_rng(1)
    row: dict[str, Any] = {"observation": random.standard_normal((ROWS, 4)).astype(np.float32)}
    for rule in mask_rules(action):
        mask = random.random((ROWS, *rule.shape)) < 0.5
        mask[:, ::2] |= ~mask.any(1, keepdims=True)
        row[rule.name] = mask
    return policy, row


def tensors(row: dict[str, Any]) -> dict[str, Tensor]:
    """For the learner's half."""
    return {path: torch.from_numpy(array) for path, array in row.items()}


def test_a_forbidden_action_is_never_drawn_and_has_probability_zero() -> None:
    policy, row = made(Discrete(5))
    outputs = policy.outputs(policy.read(tensors(row)))
    shares = torch.softmax(outputs.parameters, -1)
    mask = torch.from_numpy(row["mask/action"])
    assert (shares[~mask] == 0).all()
    torch.testing.assert_close(shares.sum(1), torch.ones(ROWS, dtype=torch.float64))
    for _ in range(50):
        acted = policy.act(row)
        assert row["mask/action"][np.arange(ROWS), acted.action["action"]].all()
    best = policy.act(row, deterministic=True).action["action"]
    np.testing.assert_array_equal(best, shares.argmax(1).numpy())


@pytest.mark.parametrize(
    "action",
    [Discrete(5), MultiDiscrete((3, 4)), Tuple((Discrete(3), box(2)))],
    ids=["one", "several", "hybrid"],
)
def test_actor_and_learner_agree_on_the_log_probability(action: Space) -> None:
    policy, row = made(action)
    if isinstance(action, MultiDiscrete):
        row["mask/action"][:, [0, 3]] = True
    acted = policy.act(row)
    np.testing.assert_allclose(policy.log_prob(row, acted.action), acted.log_prob, atol=1e-5)
    np.testing.assert_allclose(policy.acting_log_prob(row, acted.action), acted.log_prob, atol=1e-5)
    free = {"observation": row["observation"]}
    assert not np.allclose(policy.log_prob(free, acted.action), acted.log_prob, atol=1e-2)


def test_the_entropy_is_that_of_the_allowed_actions() -> None:
    policy, row = made(Discrete(5))
    row["mask/action"][0] = [False, True, False, False, False]
    parameters = policy.outputs(policy.read(tensors(row))).parameters
    found = policy.joint_entropy(parameters)
    for n, mask in enumerate(torch.from_numpy(row["mask/action"])):
        expected = torch.distributions.Categorical(logits=parameters[n][mask]).entropy()
        torch.testing.assert_close(found[n], expected, atol=1e-9, rtol=1e-9)
    assert found[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_stay_finite_and_forbidden_logits_have_none(dtype: torch.dtype) -> None:
    head = build(box(4), Discrete(4), PolicySection(), 0)
    logits = torch.tensor([[1e4, -1e4, 3.0, 0.0], [0.0, 80.0, -80.0, 1.0]], dtype=dtype, requires_grad=True)
    forbidden = torch.tensor([[False, True, False, True], [True, False, True, True]])
    hidden = masked(logits, forbidden)
    log_prob = head.joint_log_prob(hidden, {"action": torch.tensor([2, 1])})
    entropy = head.joint_entropy(hidden)
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(entropy).all()
    (log_prob.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[forbidden] == 0).all()


def test_acting_where_nothing_is_allowed_names_the_row() -> None:
    policy, row = made(Discrete(5))
    row["mask/action"][7] = False
    with pytest.raises(ValueError, match="mask of row 7 allows nothing"):
        policy.act(row)
