"""Layers by hand and Adam over one vector, against autograd and torch.optim."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.settings import PolicySection
from penstock.learner.algorithms.fast import optimiser
from penstock.learner.algorithms.fast.network import AutogradNetwork, DenseNetwork, Network, network_of
from penstock.learner.algorithms.fast.optimiser import FlatAdam
from penstock.policy.actor_critic import Outputs
from penstock.policy.build import build
from penstock.policy.networks import Inputs
from penstock.policy.policy import Policy
from penstock.protocol.spaces import Discrete, Space
from tests.support.experience.experience import box, small_policy
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
    loss = loss_of(policy, network.outputs(Inputs(rows)))
    return network.gradient([loss], [torch.ones_like(loss)])


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_hand_are_those_of_autograd(name: str) -> None:
    policy = double(name)
    adam = FlatAdam(policy, 1e-5)
    by_hand, by_autograd = DenseNetwork(policy, adam), AutogradNetwork(policy, adam)
    for count in (64, 17, 100):
        rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        expected = gradient_of(policy, by_autograd, rows).clone()
        found = gradient_of(policy, by_hand, rows)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_slopes_at_the_outputs_are_followed_as_autograd_does(name: str, is_masked: bool) -> None:
    policy = double(name)
    adam = FlatAdam(policy, 1e-5)
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = policy.outputs(Inputs(rows)).parameters
    forbidden = torch.zeros(parameters.shape, dtype=torch.bool)
    forbidden[::3, 0] = True
    inputs = Inputs(rows, forbidden=forbidden if is_masked else None)
    random = torch.Generator().manual_seed(2)
    by_parameters = torch.randn(parameters.shape, generator=random, dtype=torch.float64) / 40
    by_value = torch.randn(40, generator=random, dtype=torch.float64) / 40
    by_heads = [
        torch.randn(own.shape, generator=random, dtype=torch.float64) for own in policy.heads.parameters()
    ]
    for given in ([], by_heads):
        gradients = []
        for network in (DenseNetwork(policy, adam), AutogradNetwork(policy, adam)):
            outputs = map(torch.as_tensor, network.plain_outputs(inputs))
            expected = policy.outputs(inputs)
            for output, same in zip(outputs, (expected.parameters, expected.value), strict=True):
                torch.testing.assert_close(output, same.detach(), rtol=1e-12, atol=1e-15)
            adam.flat_gradient.fill_(7.0)
            gradients.append(network.gradient_at(by_parameters, by_value, given).clone())
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


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
        assert isinstance(network_of(policy, FlatAdam(policy, 1e-5)), AutogradNetwork)


@pytest.mark.parametrize("small", [0, 2**20], ids=["tensors", "arrays"])
def test_steps_are_those_of_torchs_adam_with_clipped_gradients(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimiser, "_SMALL", small)
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
    backup = adam.backup()
    first = step()
    adam.restore(backup)
    assert torch.equal(step(), first)
