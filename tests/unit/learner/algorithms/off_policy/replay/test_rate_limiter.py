"""The ratio of gradient steps to insertions: its bounds, and that it never comes to a standstill."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.learner.algorithms.off_policy.off_policy import SampleToInsertRatio


def limiter(**changed: float) -> SampleToInsertRatio:
    """Half a gradient step per insertion, from 100 steps on."""
    given = {"ratio": 0.5, "minimum": 100, "buffer_steps": 20} | changed
    return SampleToInsertRatio(**given)  # type: ignore[arg-type]


def test_nothing_is_drawn_before_there_is_enough() -> None:
    given = limiter()
    given.inserted(99)
    assert not given.may_draw(99)
    given.inserted(1)
    drawn = 0
    while given.may_draw(100):
        given.drawn()
        drawn += 1
    # 20 steps, of half a gradient step each.
    assert drawn == 10
    assert given.due == -10


def test_the_ratio_holds_over_time() -> None:
    given, drawn = limiter(), 0
    for _ in range(1000):
        given.inserted(10)
        while given.may_draw(given.counts.inserted):
            given.drawn()
            drawn += 1
    # Behind the first 100 steps, and ahead by the buffer of 20.
    assert drawn == (10_000 - 100 + 20) // 2


def test_what_is_too_far_ahead_may_not_enter() -> None:
    given = limiter(buffer_steps=20)
    given.inserted(120)
    assert not given.may_insert(1)
    with pytest.raises(RuntimeError, match="1 steps entered with 10 gradient steps due"):
        given.inserted(1)


@pytest.mark.parametrize(
    ("insertion", "capacity", "message"),
    [
        (16, 115, r"algorithm\.capacity=115: .*learning_starts=100.*fragment of 16.*give at least 116"),
        (21, 1000, r"algorithm\.error_steps=20: .*fragments of 21 steps.*give at least 21"),
    ],
)
def test_what_would_block_for_good_is_refused_with_the_figures(
    insertion: int, capacity: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        limiter().check(insertion=insertion, capacity=capacity)


def test_a_ratio_far_below_one_needs_a_buffer_of_half_its_inverse() -> None:
    given = limiter(ratio=0.001, buffer_steps=400)
    with pytest.raises(ValueError, match="give at least 504"):
        given.check(insertion=8, capacity=10_000)
    limiter(ratio=0.001, buffer_steps=504).check(insertion=8, capacity=10_000)


@settings(max_examples=30)
@given(
    ratio=st.floats(0.0001, 100),
    minimum=st.integers(1, 500),
    buffer=st.integers(1, 2000),
    insertion=st.integers(1, 300),
    sizes=st.lists(st.integers(1, 300), min_size=5, max_size=30),
)
def test_what_is_not_refused_never_blocks(
    ratio: float, minimum: int, buffer: int, insertion: int, sizes: list[int]
) -> None:
    given = SampleToInsertRatio(ratio=ratio, minimum=minimum, buffer_steps=buffer)
    capacity = minimum + insertion
    try:
        given.check(insertion=insertion, capacity=capacity)
    except ValueError:
        assume(False)
    size = 0
    for steps in sizes:
        entering = min(steps, insertion)
        given.inserted(entering)
        size = min(capacity, size + entering)
        while given.may_draw(size):
            given.drawn()
    assert given.may_insert(insertion)


def advance(given: SampleToInsertRatio, steps: int) -> int:
    """Insert so many steps, and return how many gradient steps that allows."""
    given.inserted(steps)
    drawn = 0
    while given.may_draw(given.counts.inserted):
        given.drawn()
        drawn += 1
    return drawn


@pytest.mark.parametrize("ratio", [0.05, 0.25, 1.0, 4.0])
def test_a_ratio_that_changes_at_a_resume_holds_from_then_on(ratio: float) -> None:
    before = limiter()
    for _ in range(100_000):
        advance(before, 10)
    after = limiter(ratio=ratio)
    after.counts = before.counts
    after.rebase()
    made = [advance(after, 10) for _ in range(100)]
    assert sum(made) == pytest.approx(1000 * ratio, abs=1)
    assert max(made) <= 10 * ratio + 1


def test_what_did_not_change_goes_on_as_it_was() -> None:
    given = limiter(ratio=0.3)
    for _ in range(40):
        advance(given, 7)
        due = given.due
        given.rebase()
        assert given.due == due
