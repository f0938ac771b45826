"""The head that mixes answers behind thoughts with those without: what it gives, what it may not touch."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.sections import PolicySection
from penstock.config.settings import ConfigurationError
from penstock.protocol.spaces import Discrete
from penstock.workloads.thoughts.model import build, head_of, mixed, mixing_width
from tests.support.thoughts.small_thoughts import small_base, thinking_policy


def test_both_answers_are_mixed_as_probabilities() -> None:
    behind, without = torch.randn(3, 5).log_softmax(-1), torch.randn(3, 5).log_softmax(-1)
    odds = torch.tensor([-2.0, 0.0, 3.0])
    found = mixed(odds, behind, without).exp()
    for row, one in enumerate(odds.tolist()):
        share = 1.0 / (1.0 + math.exp(-one))
        expected = share * behind[row].exp() + (1.0 - share) * without[row].exp()
        assert torch.allclose(found[row], expected, atol=1e-6)
    assert torch.allclose(found.sum(1), torch.ones(3))


def test_the_answer_without_a_thought_gets_no_gradient_from_the_mix() -> None:
    behind, without = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    odds = torch.zeros(2, requires_grad=True)
    mixed(odds, behind.log_softmax(-1), without.log_softmax(-1))[:, 0].sum().backward()
    assert behind.grad is not None
    assert odds.grad is not None
    assert without.grad is None


def test_a_head_is_published_with_the_policy_and_begins_with_even_odds(tmp_path: Path) -> None:
    base = small_base(tmp_path / "base")
    plain, policy = thinking_policy(base), thinking_policy(base, mixing=8)
    assert head_of(plain.network) is None
    head = head_of(policy.network)
    assert head is not None
    assert head(torch.randn(3, 16), torch.randn(3, 16)).tolist() == [0.0] * 3
    more = policy.state_dict().keys() - plain.state_dict().keys()
    assert more == {
        f"mixing_head.{part}.{kind}" for part in ("hidden", "last") for kind in ("weight", "bias")
    }
    other = thinking_policy(base, mixing=8)
    with torch.no_grad():
        head.last.bias.fill_(2.0)
    other.load_state_dict(policy.state_dict())
    copied = head_of(other.network)
    assert copied is not None
    assert copied.last.bias.tolist() == [2.0]


@pytest.mark.parametrize("width", [-1, "8", True, 1.5])
def test_a_width_that_is_none_is_refused(width: Any) -> None:
    with pytest.raises(ConfigurationError, match="policy.kwargs.mixing="):
        mixing_width(PolicySection(kwargs={"mixing": width}))


def test_a_critic_of_tokens_is_refused() -> None:
    section, tokens = PolicySection(kwargs={"model": "x", "critic": "adapter"}), Discrete(9)
    with pytest.raises(
        ConfigurationError, match=r"policy\.kwargs\.critic='adapter': thoughts have no critic"
    ):
        build(tokens, tokens, section, 0)
