"""Low, likely and high: what measurements make of them."""

import pytest

from penstock.config.estimate import MARGIN, Range, Scores, total


def test_a_range_is_the_measured_spread_with_the_margin_beyond() -> None:
    """Nothing else widens it."""
    found = Range.of([2.0, 4.0, 3.0])
    assert (found.low, found.likely, found.high) == (2.0 * (1 - MARGIN), 3.0, 4.0 * (1 + MARGIN))


def test_what_is_likely_may_be_known_better_than_by_the_mean_and_is_never_outside() -> None:
    """Such as a rate over all of the time, beside those of its parts."""
    found = Range.of([2.0, 4.0], 5.0)
    assert [found.low, found.likely, found.high] == pytest.approx([1.8, 5.0, 5.5])


def test_ranges_add_up_and_scale_end_by_end() -> None:
    """As if all came out low, or all high."""
    parts = [Range(low=1.0, likely=2.0, high=4.0), Range.exactly(3.0)]
    assert total(parts) == Range(low=4.0, likely=5.0, high=7.0)
    assert total(parts).times(2.0) == Range(low=8.0, likely=10.0, high=14.0)
    assert total([]) == Range.exactly(0.0)


def test_a_bound_holds_for_each_end() -> None:
    """A file that may grow to at most so much."""
    bounded = Range(low=1.0, likely=5.0, high=9.0).at_most(Range.exactly(4.0))
    assert bounded == Range(low=1.0, likely=4.0, high=4.0)


def test_scores_are_counted_and_those_of_nothing_are_none() -> None:
    """The deviation is that of the population."""
    assert Scores.of([1.0, 3.0]) == Scores(count=2, mean=2.0, std=1.0)
    assert Scores.of([]) == Scores(count=0, mean=None, std=None)
