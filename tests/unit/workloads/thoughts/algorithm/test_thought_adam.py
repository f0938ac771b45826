"""The optimiser: as torch's own, and moments under the paths of a checkpoint."""

import copy

import pytest
import torch
from torch import nn

from penstock.workloads.thoughts.reinforce import ThoughtAdam


def stepped(optimiser: ThoughtAdam, network: nn.Module, rows: torch.Tensor, count: int) -> None:
    """Steps down a loss of rows."""
    for _ in range(count):
        gradient = optimiser.gradient_of(network(rows).square().mean())
        optimiser.step(gradient, 1e-2, 1.0)


def test_it_steps_as_adamw_and_goes_on_after_a_load() -> None:
    network, rows = nn.Linear(3, 2), torch.randn(5, 3)
    twin = copy.deepcopy(network)
    optimiser = ThoughtAdam(dict(network.named_parameters()), 1e-8)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    stepped(optimiser, network, rows, 3)
    for _ in range(3):
        plain.zero_grad()
        twin(rows).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
    assert torch.allclose(network.weight, twin.weight, atol=1e-7)
    other = copy.deepcopy(network)
    loaded = ThoughtAdam(dict(other.named_parameters()), 1e-8)
    loaded.load_moments(optimiser.moments(), optimiser.steps)
    stepped(optimiser, network, rows, 2)
    stepped(loaded, other, rows, 2)
    assert torch.equal(network.weight, other.weight)


def test_it_goes_back_to_a_copy_byte_for_byte() -> None:
    network, rows = nn.Linear(3, 2), torch.randn(5, 3)
    optimiser = ThoughtAdam(dict(network.named_parameters()), 1e-8)
    stepped(optimiser, network, rows, 2)
    go_back, weight = optimiser.backup(), network.weight.detach().clone()
    stepped(optimiser, network, rows, 1)
    after = network.weight.detach().clone()
    go_back()
    assert torch.equal(network.weight, weight)
    stepped(optimiser, network, rows, 1)
    assert torch.equal(network.weight, after)


def test_moments_have_the_paths_of_a_checkpoint_and_those_of_another_network_are_refused() -> None:
    optimiser = ThoughtAdam(dict(nn.Linear(3, 2).named_parameters()), 1e-8)
    other = ThoughtAdam(dict(nn.Linear(4, 2).named_parameters()), 1e-8)
    assert set(optimiser.moments()) == {
        f"{name}/{kind}" for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq")
    }
    with pytest.raises(ValueError, match="first/weight"):
        optimiser.load_moments(other.moments(), 1)
