"""The learned baseline: what it reads, and what it may not know."""

import pytest
import torch

from penstock.workloads.thoughts.reinforce import ThoughtBaseline, pooled


def test_a_pooled_state_knows_nothing_of_later_tokens() -> None:
    states, row = torch.arange(10.0).view(5, 2), torch.tensor([0, 0, 1, 1, 1])
    found = pooled(states, row)
    expected = [states[0], states[:2].mean(0), states[2], states[2:4].mean(0), states[2:].mean(0)]
    assert torch.allclose(found, torch.stack(expected))


@pytest.mark.parametrize(("layers", "linear"), [(1, 1), (2, 2), (4, 4)])
def test_it_is_as_deep_as_is_asked_for_and_begins_at_zero(layers: int, linear: int) -> None:
    baseline = ThoughtBaseline(6, layers=layers, width=8, seed=0)
    assert sum(isinstance(part, torch.nn.Linear) for part in baseline.network) == linear
    assert baseline(torch.randn(3, 6)).tolist() == [0.0, 0.0, 0.0]
