"""Learning rate and clip range over a run."""

import pytest

from learner.algorithms.schedule import Schedule, factor, warmup


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", (1.0, 1.0, 1.0)), ("linear", (1.0, 0.75, 0.0)), ("cosine", (1.0, 0.8535534, 0.0))],
)
def test_starts_at_one_and_ends_where_it_should(schedule: Schedule, expected: tuple[float, ...]) -> None:
    """At the start, a quarter and the end; beyond the end it stays."""
    found = [factor(schedule, progress) for progress in (0.0, 0.25, 1.0)]
    assert found == pytest.approx(expected)
    assert factor(schedule, 1.7) == pytest.approx(expected[-1])


def test_warmup_rises_in_equal_steps() -> None:
    """The first update already moves; off means 1."""
    assert [warmup(updates, 4) for updates in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup(0, 0) == 1.0
