"""Which fragments go to which rank."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.learner.ranks.roles import divide


def parts(charges: list[int], ranks: int) -> list[list[int]]:
    """The charges of each rank."""
    return [charges[part] for part in divide(charges, ranks)]


def test_equal_fragments_are_divided_evenly() -> None:
    assert parts([8, 8, 8, 8], 2) == [[8, 8], [8, 8]]
    assert parts([8, 8, 8], 3) == [[8], [8], [8]]
    assert parts([1, 1, 1, 3], 2) == [[1, 1, 1], [3]]


def test_fewer_fragments_than_ranks_leave_some_without() -> None:
    assert sorted(map(len, parts([8], 3))) == [0, 0, 1]
    assert parts([], 2) == [[], []]


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_every_fragment_goes_to_one_rank(charges: list[int], ranks: int) -> None:
    divided = parts(charges, ranks)
    assert [charge for part in divided for charge in part] == charges
    assert len(divided) == ranks
    largest = max(charges, default=0)
    if sum(charges):
        assert all(sum(part) <= sum(charges) / ranks + largest for part in divided)
