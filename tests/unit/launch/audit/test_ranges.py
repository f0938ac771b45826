"""Ranges are sets: every operation agrees with Python's."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.launch.audit import findings

Numbers = st.sets(st.integers(1, 40))
Loose = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)).map(lambda one: (one[0], sum(one))))


def members(found: findings.Ranges) -> set[int]:
    """The numbers, each of which must be in one range only."""
    listed = list(findings.numbers(found))
    assert len(listed) == len(set(listed))
    return set(listed)


@given(Numbers, Numbers)
def test_subtract_and_intersect_agree_with_sets(left: set[int], right: set[int]) -> None:
    a, b = findings.of_numbers(left), findings.of_numbers(right)
    assert members(findings.subtract(a, b)) == left - right
    assert members(findings.intersect(a, b)) == left & right
    assert findings.merge(findings.subtract(a, b)) == findings.subtract(a, b)
    assert findings.count(a) == len(left)


@given(Loose)
def test_overlaps_are_what_is_there_more_than_once(loose: findings.Ranges) -> None:
    times = Counter(findings.numbers(loose))
    assert members(findings.overlaps(loose)) == {number for number, count in times.items() if count > 1}
    assert members(findings.merge(loose)) == set(times)
