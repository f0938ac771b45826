"""How well numbers order what people said."""

import numpy as np
import pytest

from benchmarks.human_ratings import measure


def test_an_order_is_measured_between_none_and_all_of_it() -> None:
    """Of the scores themselves, of a constant, of the scores upside down, and of scores with noise."""
    rng = np.random.default_rng(0)
    scores = [rng.integers(1, 11, 80).astype(float) for _ in range(2)]
    for said, pairs, spearman in (
        (scores, 1.0, 1.0),
        ([np.zeros(80)] * 2, 0.5, 0.0),
        ([-one for one in scores], 0.0, -1.0),
    ):
        found = measure(said, scores, 0)
        assert found.pairs == pytest.approx((pairs,) * 3)
        assert found.spearman == pytest.approx((spearman,) * 3)
    noisy = measure([one + 3 * rng.standard_normal(80) for one in scores], scores, 0)
    for value, low, high in (noisy.pairs, noisy.spearman):
        assert low < value < high
        assert 0.04 < high - low < 0.3
    assert 0.65 < noisy.pairs[0] < 0.9


def test_conversations_of_two_folds_are_not_compared() -> None:
    """What a fold's numbers begin at says nothing."""
    scores = [np.arange(20.0), np.arange(20.0) + 100]
    assert measure([scores[0] + 1000, scores[1]], scores, 0).pairs[0] == 1.0
