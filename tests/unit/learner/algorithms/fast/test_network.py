"""Layers by hand and Adam over one vector, against autograd and torch.optim."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms import gradient
from penstock.learner.algorithms.gradient import (
    _FORMS,
    DenseNetwork,
    FlatAdam,
    Network,
    _value_slope,
    has_slopes,
    network_of,
)
from penstock.learner.algorithms.losses import Objective
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.rows import Rows
from penstock.policy.actor_critic import Outputs
from penstock.policy.networks import Inputs, masked
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Discrete, Space
from tests.support.experience.experience import box, small_policy
from tests.unit.penstock.policy.test_distributions import HEADS, parameters
from tests.unit.penstock.policy.test_policy import image

CASES: dict[str, tuple[Space, dict[str, Any]]] = {
    "discrete": (Discrete(3), {}),
    "gaussian": (box(2), {"activation": "relu"}),
    "squashed": (box(2), {"continuous": "squashed"}),
    "shared": (Discrete(3), {"shared_trunk": True}),
    "no-hidden": (Discrete(3), {"hidden_sizes": ()}),
    "shared-no-hidden": (Discrete(3), {"hidden_sizes": (), "shared_trunk": True}),
}


def double(name: str) -> Policy:
    """A float64 policy."""
    action, section = CASES[name]
    return small_policy(2, action, **section).double()


def loss_of(policy: Policy, outputs: Outputs) -> Tensor:
    """Any smooth function of both outputs and the entropy."""
    wave = (outputs.parameters.sin().sum(1) * outputs.value.cos()).mean()
    return wave + 0.3 * policy.joint_entropy(outputs.parameters).mean()


def gradient_of(policy: Policy, network: Network, rows: Tensor) -> Tensor:
    """Of that function by all parameters."""
    return network.gradient(loss_of(policy, network.outputs(Inputs(rows))))


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_hand_are_those_of_autograd(name: str) -> None:
    policy = double(name)
    adam = FlatAdam(policy, 1e-5)
    by_hand, by_autograd = DenseNetwork(policy, adam), Network(policy, adam)
    for count in (64, 17, 100):
        rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        expected = gradient_of(policy, by_autograd, rows).clone()
        found = gradient_of(policy, by_hand, rows)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


CLIPPED = Objective(learning_rate=0.1, value_coefficient=0.5, entropy_coefficient=0.1, clip_range=0.2)
OBJECTIVES = {
    "plain": replace(CLIPPED, entropy_coefficient=0.0, clip_range=None),
    "clipped": replace(CLIPPED, value_clip=0.3),
    "dual": replace(CLIPPED, dual_clip=1.5),
}


def rows_of(policy: Policy, count: int, *, is_masked: bool) -> Rows:
    """Rows of a minibatch, a share of a larger one; where masked, some choices are forbidden."""
    random = torch.Generator().manual_seed(count)
    vector = torch.randn(count, 4, generator=random, dtype=torch.float64)
    forbidden = torch.zeros((count, policy.actor_head.out_features), dtype=torch.bool)
    forbidden[::3, 0] = not policy.action_heads[0].state_dict()  # a mask is of choices
    inputs = Inputs(vector, forbidden=forbidden if is_masked else None)
    (head,) = policy.action_heads
    with torch.no_grad():
        parameters = policy.outputs(inputs).parameters
    drawn = torch.from_numpy(np.asarray(head.draw(parameters.numpy(), np.random.default_rng(1))[0]))
    columns = torch.randn(6, count, generator=random, dtype=torch.float64)
    columns[0] = policy.joint_log_prob(parameters, {head.path: drawn}).detach() + 0.3 * columns[0]
    return Rows(columns, inputs, {head.path: drawn}, 2 * count)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if name != "squashed"])
def test_the_closed_form_is_the_gradient_of_autograd(
    name: str, is_masked: bool, objective: Objective
) -> None:
    policy = double(name)
    ppo = PPO(policy, PPOSection(), seed=0)
    rows = rows_of(policy, 40, is_masked=is_masked)
    by_hand = ppo._network
    assert isinstance(by_hand, DenseNetwork)
    assert by_hand.is_closed
    found = [part.clone() for part in by_hand.gradient_of(rows, objective)]
    again = by_hand.log_prob(policy.outputs(rows.inputs).parameters.detach(), rows.action)
    ppo._optimiser.flat_gradient.fill_(7.0)
    ppo._network = Network(policy, ppo._optimiser)
    expected = ppo.gradient_of(rows, objective)
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(again, found[0], rtol=1e-12, atol=1e-14)


def test_rounding_does_not_stop_the_critic() -> None:
    generator = torch.Generator().manual_seed(0)
    value, old = (torch.randn(4096, generator=generator).numpy() * 0.01 for _ in range(2))
    target = torch.randn(4096, generator=generator).numpy()
    clipped, plain = (_value_slope(value, target, old, clip, 4096)[1] for clip in (1.0, None))
    np.testing.assert_array_equal(clipped, plain)


@pytest.mark.parametrize("by_entropy", [0.0, -0.3])
@pytest.mark.parametrize("name", ["categorical", "masked categorical", "multi-categorical", "gaussian"])
def test_slopes_in_closed_form_are_those_of_autograd(name: str, by_entropy: float) -> None:
    head = HEADS[name.removeprefix("masked ")]().double()
    outputs = parameters(head).double().requires_grad_()
    forbidden = torch.zeros(outputs.shape, dtype=torch.bool)
    forbidden[::2, 1:3] = "masked" in name
    shown = masked(outputs, forbidden)
    action = np.asarray(head.draw(shown.detach().numpy(), np.random.default_rng(2))[0])
    weights = torch.randn(len(action), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    log_prob = head.log_prob(shown, torch.from_numpy(action))
    loss = (log_prob * weights).sum() + by_entropy * head.entropy(shown).sum()
    wanted = [outputs, *head.parameters()]
    expected = torch.autograd.grad(loss, wanted, materialize_grads=True)
    form = _FORMS[type(head)](head, shown.detach().numpy(), action)
    by_parameters, by_own = form.slopes(weights.numpy(), by_entropy)
    found = [torch.as_tensor(one) for one in (form.log_prob, by_parameters, *by_own)]
    torch.testing.assert_close(found, [log_prob.detach(), *expected], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_outputs_by_hand_are_the_policys(name: str) -> None:
    policy = double(name)
    network = DenseNetwork(policy, FlatAdam(policy, 1e-5))
    inputs = Inputs(torch.randn(50, 4, dtype=torch.float64))
    found, expected = network.outputs(inputs), policy.outputs(inputs)
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-15)


def test_only_dense_networks_are_done_by_hand() -> None:
    dense, curved = small_policy(), small_policy(activation="silu")
    seeing = build(image(8, 8, 3), Discrete(2), PolicySection(), 0)
    assert isinstance(network_of(dense, FlatAdam(dense, 1e-5)), DenseNetwork)
    for policy in (curved, seeing):
        assert not isinstance(network_of(policy, FlatAdam(policy, 1e-5)), DenseNetwork)
    assert has_slopes(dense)


def test_a_head_of_other_numbers_has_not_the_slopes_of_its_base() -> None:
    assert not has_slopes(double("squashed"))
    assert not has_slopes(small_policy(0, Discrete(3), discrete="epsilon_greedy"))


@pytest.mark.parametrize("small", [0, 2**20], ids=["tensors", "arrays"])
def test_steps_are_those_of_torchs_adam_with_clipped_gradients(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient, "_SMALL", small)
    flat, plain = double("gaussian"), double("gaussian")
    adam = FlatAdam(flat, 1e-5)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2, eps=1e-5)
    network = network_of(flat, adam)
    for step in range(50):
        rows = (1 + step % 3) * torch.randn(32, 4, dtype=torch.float64)
        norm = adam.step(gradient_of(flat, network, rows), 1e-2, 0.3)
        reference.zero_grad()
        loss_of(plain, plain.outputs(Inputs(rows))).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        reference.step()
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        scaled = torch.cat([own.grad.flatten() for own in plain.parameters() if own.grad is not None])
        torch.testing.assert_close(adam.flat_gradient, scaled, rtol=1e-9, atol=1e-12)
    for one, other in zip(flat.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_restored_optimiser_goes_on_as_if_nothing_had_happened() -> None:
    policy = double("discrete")
    adam = FlatAdam(policy, 1e-5)
    network, rows = network_of(policy, adam), torch.randn(32, 4, dtype=torch.float64)

    def step() -> Tensor:
        adam.step(gradient_of(policy, network, rows), 1e-2, 0.5)
        return adam.parameters.clone()

    step()
    go_back = adam.backup()
    first = step()
    go_back()
    assert torch.equal(step(), first)
