"""Ranges are sets: every operation agrees with Python's."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.launch.audit import ranges

Numbers = st.sets(st.integers(1, 40))
Loose = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)).map(lambda one: (one[0], sum(one))))


def members(found: ranges.Ranges) -> set[int]:
    """The numbers, each of which must be in one range only."""
    listed = list(ranges.numbers(found))
    assert len(listed) == len(set(listed))
    return set(listed)


@given(Numbers, Numbers)
def test_subtract_and_intersect_agree_with_sets(left: set[int], right: set[int]) -> None:
    a, b = ranges.of_numbers(left), ranges.of_numbers(right)
    assert members(ranges.subtract(a, b)) == left - right
    assert members(ranges.intersect(a, b)) == left & right
    assert ranges.merge(ranges.subtract(a, b)) == ranges.subtract(a, b)
    assert ranges.count(a) == len(left)


@given(Loose)
def test_overlaps_are_what_is_there_more_than_once(loose: ranges.Ranges) -> None:
    times = Counter(ranges.numbers(loose))
    assert members(ranges.overlaps(loose)) == {number for number, count in times.items() if count > 1}
    assert members(ranges.merge(loose)) == set(times)
