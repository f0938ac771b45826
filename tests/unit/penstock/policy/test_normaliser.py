"""Running statistics: exact whatever the grouping."""

import numpy as np
import pytest
import torch

from penstock.policy.acting.array_policy import NumpyNormaliser
from penstock.policy.networks import Normaliser, moments


def rows(count: int = 1000) -> torch.Tensor:
    """Far from 0 and of unequal scale: what a naive sum of squares gets wrong."""
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return 1e6 + noise * torch.tensor([1e-2, 1.0, 1e3])


def test_any_grouping_gives_the_statistics_of_all_rows() -> None:
    data = rows()
    for sizes in ([1000], [1] * 1000, [7, 493, 500]):
        normaliser = Normaliser(3, 10.0)
        for group in data.split(sizes):
            normaliser.merge(moments(group))
        assert normaliser.count.item() == 1000
        np.testing.assert_allclose(normaliser.mean, data.mean(0), rtol=1e-12)
        np.testing.assert_allclose(normaliser.variance, data.var(0, correction=0), rtol=1e-8)


def test_normalised_rows_have_mean_zero_and_variance_one() -> None:
    normaliser = Normaliser(3, 2.0)
    normaliser.merge(moments(rows()))
    result = normaliser(rows())
    assert result.mean(0).abs().max() < 0.05
    assert result.abs().max() == 2.0


def test_identity_before_the_first_merge() -> None:
    data = torch.tensor([[1.0, -3.0, 50.0]])
    torch.testing.assert_close(Normaliser(3, 10.0)(data), torch.tensor([[1.0, -3.0, 10.0]]))


def test_numpy_rounds_like_torch() -> None:
    normaliser = Normaliser(3, 10.0)
    fast = NumpyNormaliser(normaliser.mean.numpy(), normaliser.variance.numpy(), normaliser.clip)
    normaliser.merge(moments(rows()))
    for dtype in (torch.float32, torch.float64):
        data = rows().to(dtype)
        np.testing.assert_allclose(fast(data.numpy()), normaliser(data).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.promise("extreme-observation-space-permits")
def test_one_extreme_row_does_not_blind_the_policy() -> None:
    normaliser = Normaliser(3, 10.0)
    normaliser.merge(normaliser.observe(rows()))
    before = normaliser.variance.clone()
    np.testing.assert_array_equal(normaliser.observe(rows()).spread, moments(rows()).spread)
    normaliser.merge(normaliser.observe(torch.full((1, 3), 9e8, dtype=torch.float64)))
    # 100² of one row in 1,001, and the variance of the others.
    assert (normaliser.variance / before).max() < 12
    assert not normaliser.observe(torch.tensor([[torch.nan, torch.inf, 0.0]])).checksum().isfinite()


def test_what_is_large_from_now_on_is_followed() -> None:
    normaliser = Normaliser(1, 10.0)
    still = torch.zeros((100_000, 1), dtype=torch.float64)
    moving = 1e5 * torch.randn(2048, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    normaliser.merge(normaliser.observe(still))
    for _ in range(10):
        normaliser.merge(normaliser.observe(moving))
    assert normaliser.variance.sqrt().item() > 2e4
