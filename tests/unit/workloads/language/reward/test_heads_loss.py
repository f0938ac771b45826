"""Unrated responses move nothing, and each kind of rating pulls its head to what was said."""

import math

import pytest
import torch

from penstock.workloads.language.reward.heads import parse_heads
from penstock.workloads.language.reward.training import RATING_WEIGHT, heads_loss

NAN = float("nan")
HEADS = parse_heads(["thumb=thumbs", "relevance=stars"])
NO_PAIRS = torch.zeros(0, 2)


def test_it_is_the_sum_over_heads_of_means_over_what_was_said() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 5.0]])
    targets = torch.tensor([[1.0, 1.0], [0.0, NAN]])
    choice = (math.log(2) + math.log(4)) / 2
    assert float(heads_loss(logits, targets, HEADS, NO_PAIRS, 0.0)) == pytest.approx(
        choice + RATING_WEIGHT * 0.25
    )


def test_what_is_missing_has_no_gradient() -> None:
    logits = torch.randn(3, 2, requires_grad=True)
    targets = torch.tensor([[1.0, NAN], [NAN, NAN], [0.0, NAN]])
    heads_loss(logits, targets, HEADS, NO_PAIRS, 0.0).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, 1] == 0).all()
    assert (logits.grad[1] == 0).all()
    assert (logits.grad[[0, 2], 0] != 0).all()


def test_a_pair_pulls_its_numbers_apart_and_to_zero_together() -> None:
    pairs = torch.tensor([[1.0, 3.0]], requires_grad=True)
    empty = torch.zeros(0, 2)
    loss = heads_loss(empty, empty, HEADS, pairs, 0.0)
    assert float(loss.detach()) == pytest.approx(math.log1p(math.exp(2.0)))
    loss.backward()
    assert pairs.grad is not None
    assert pairs.grad[0, 0] < 0 < pairs.grad[0, 1]
    assert float(heads_loss(empty, empty, HEADS, pairs.detach(), 0.5)) == pytest.approx(
        float(loss.detach()) + 8.0
    )


@pytest.mark.parametrize("head", [0, 1])
def test_the_least_loss_is_at_the_mean_of_what_was_said(head: int) -> None:
    targets = torch.full((4, 2), NAN)
    targets[:, head] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    shares = torch.linspace(0.05, 0.95, 19)
    losses = [
        float(heads_loss(torch.full((4, 2), float(one.logit())), targets, HEADS, NO_PAIRS, 0.0))
        for one in shares
    ]
    assert float(shares[losses.index(min(losses))]) == pytest.approx(0.75)
