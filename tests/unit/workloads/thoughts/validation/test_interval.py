"""Intervals and correlations."""

import numpy as np
import pytest

from workloads.thoughts.validation.interval import correlation, interval


def test_an_interval_covers_the_mean_it_was_drawn_around() -> None:
    """In about 95 of 100 samples."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        found = interval(random.normal(0.3, 1.0, size=100))
        covered += found.low <= 0.3 <= found.high
    assert 180 <= covered <= 199


def test_a_correlation_without_variance_cannot_tell() -> None:
    """Rather than dividing by almost nothing."""
    rising = np.arange(10.0)
    assert correlation(np.ones(10), rising) is None
    assert correlation(rising, np.full(10, 2.0)) is None
    assert correlation(rising, -rising) == pytest.approx(-1.0)
