"""Batch normalisation with statistics that stand still, and dropout that only the learner switches on."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.policy.networks import BatchNorm, Dropout, dropouts, measure, moments, thinned

CPU = torch.device("cpu")


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    """Neither centred nor of one scale."""
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return drawn * (1.0 + torch.arange(width)) + 3.0


def test_what_was_merged_is_normalised_to_mean_0_and_variance_1() -> None:
    layer, given = BatchNorm(3), rows(500, 3)
    torch.testing.assert_close(layer(given), given, atol=1e-4, rtol=1e-5)
    layer.merge(moments(given))
    answer = layer(given)
    torch.testing.assert_close(answer.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(answer.var(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(-1.0)
    torch.testing.assert_close(layer(given), 2.0 * answer - 1.0)


def test_it_is_what_torch_computes_in_evaluation_mode() -> None:
    layer, theirs, given = BatchNorm(3), nn.BatchNorm1d(3).eval(), rows(64, 3)
    layer.merge(moments(given))
    theirs.running_mean = given.mean(0)
    theirs.running_var = given.var(0, correction=0)
    torch.testing.assert_close(layer(given), theirs(given))


def test_the_statistics_are_a_mean_of_a_hundred_batches_and_then_a_moving_average() -> None:
    layer = BatchNorm(1)
    batches = [rows(20, 1, seed) + seed for seed in range(104)]
    for batch in batches:
        layer.merge(moments(batch))
    means = np.array([batch.double().mean() for batch in batches])
    variances = np.array([batch.double().var(correction=0) for batch in batches])
    share = np.array([0.01 * 0.99**4] * 100 + [0.01 * 0.99 ** (103 - index) for index in range(100, 104)])
    assert share.sum() == pytest.approx(1.0)
    assert layer.mean.item() == pytest.approx(share @ means)
    assert layer.variance.item() == pytest.approx(share @ variances)
    assert layer.merges.item() == 104


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_pass_moves_no_statistics_in_either_mode(training: bool) -> None:
    layer = BatchNorm(3).train(training)
    layer.merge(moments(rows(50, 3)))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    many = layer(rows(9, 3, 1))
    torch.testing.assert_close(layer(rows(9, 3, 1)[4:5]), many[4:5], rtol=0, atol=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_layers_are_measured_as_they_will_be_fed() -> None:
    net = nn.Sequential(nn.Linear(4, 5), BatchNorm(5), nn.Tanh(), nn.Linear(5, 3), BatchNorm(3))
    given = rows(200, 4)
    before = net(given)
    measured = measure(net, lambda: net(given))
    assert measured is not None
    assert torch.isfinite(measured.checksum())
    assert torch.equal(net(given), before)
    measured.merge()
    for depth in (2, 5):
        answer = net[:depth](given)
        torch.testing.assert_close(answer.mean(0), torch.zeros(answer.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            answer.var(0, correction=0), torch.ones(answer.shape[1]), atol=1e-3, rtol=0
        )


def test_rows_that_are_alike_set_no_scale() -> None:
    first = nn.Linear(8, 8)
    net = nn.Sequential(
        first, *(part for _ in range(3) for part in (BatchNorm(8), nn.Tanh(), nn.Linear(8, 8)))
    )
    alike = torch.full((200, 8), 0.5)
    for given in (alike, torch.cat([rows(1, 8) / 100, alike])):
        measured = measure(net, partial(net, given))
        assert measured is not None
        measured.merge()
    before = net(alike)
    with torch.no_grad():
        first.weight += 1e-3
    assert (net(alike) - before).abs().max() < 0.05


def test_a_checksum_tells_what_is_not_finite() -> None:
    net, given = BatchNorm(2), rows(10, 2)
    given[3, 1] = torch.inf
    measured = measure(net, lambda: net(given))
    assert measured is not None
    assert not torch.isfinite(measured.checksum())


def test_there_is_nothing_to_measure_without_batch_normalisation() -> None:
    assert measure(nn.Linear(2, 2), lambda: pytest.fail("it ran")) is None


@pytest.mark.parametrize("training", [False, True])
def test_dropout_is_the_identity_outside_thinned(training: bool) -> None:
    layer, given = Dropout(0.5).train(training), rows(7, 3)
    assert layer(given) is given


def test_inside_thinned_a_share_is_dropped_and_the_mean_stays() -> None:
    layer, given = Dropout(0.25), torch.ones(1000, 40)
    with thinned(dropouts(layer), 5, CPU):
        answer = layer(given)
    torch.testing.assert_close(answer.unique(), torch.tensor([0.0, 4 / 3]))
    assert (answer == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert answer.mean().item() == pytest.approx(1.0, abs=0.01)
    assert layer(given) is given


def test_equal_seeds_drop_the_same_features() -> None:
    net = nn.Sequential(Dropout(0.5), Dropout(0.5))
    given, answers = torch.ones(50, 8), []
    for seed in (1, 1, 2):
        with thinned(dropouts(net), seed, CPU):
            answers.append(net(given))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
    assert (answers[0] == 4.0).double().mean().item() == pytest.approx(0.25, abs=0.1)


def test_the_gradient_goes_through_what_was_kept() -> None:
    layer, given = Dropout(0.5), torch.ones(6, 6, requires_grad=True)
    with thinned(dropouts(layer), 3, CPU):
        answer = layer(given)
    (gradient,) = torch.autograd.grad(answer.sum(), given)
    assert torch.equal(gradient, answer.detach())
