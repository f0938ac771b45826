"""Intervals and correlations."""

import numpy as np
import pytest

from penstock.workloads.thoughts.validation import correlation, interval


def test_an_interval_covers_the_mean_it_was_drawn_around() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        found = interval(random.normal(0.3, 1.0, size=100))
        covered += found.low <= 0.3 <= found.high
    assert 180 <= covered <= 199


def test_a_correlation_without_variance_cannot_tell() -> None:
    rising = np.arange(10.0)
    assert correlation(np.ones(10), rising) is None
    assert correlation(rising, np.full(10, 2.0)) is None
    found = correlation(rising, -rising)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((-1.0, -1.0, -1.0))


def test_an_interval_of_a_correlation_covers_the_one_it_was_drawn_with() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        one = random.normal(size=100)
        found = correlation(one, 0.6 * one + 0.8 * random.normal(size=100))
        assert found is not None
        covered += found.low <= 0.6 <= found.high
    assert 175 <= covered <= 199


def test_values_of_one_example_are_resampled_together() -> None:
    values = np.random.default_rng(2).normal(size=50)
    once, copied = interval(values), interval(np.repeat(values, 5), np.repeat(np.arange(50) * 2, 5))
    assert (copied.value, copied.low, copied.high) == pytest.approx((once.value, once.low, once.high))
