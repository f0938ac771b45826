"""Learning rate, clip range and entropy coefficient against their closed forms."""

import math

import pytest

from penstock.learner.algorithms.losses import Schedule, adapted, decayed, factor, steered, warmup


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", (1.0, 1.0, 1.0)), ("linear", (1.0, 0.75, 0.0)), ("cosine", (1.0, 0.8535534, 0.0))],
)
def test_starts_at_one_and_ends_where_it_should(schedule: Schedule, expected: tuple[float, ...]) -> None:
    found = [factor(schedule, progress) for progress in (0.0, 0.25, 1.0)]
    assert found == pytest.approx(expected)
    assert factor(schedule, 1.7) == pytest.approx(expected[-1])


def test_warmup_rises_in_equal_steps() -> None:
    assert [warmup(updates, 4) for updates in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup(0, 0) == 1.0


@pytest.mark.parametrize("progress", [i / 50 for i in range(51)])
def test_linear_and_cosine_are_their_closed_forms(progress: float) -> None:
    assert factor("linear", progress) == 1.0 - progress
    assert factor("cosine", progress) == 0.5 * (1.0 + math.cos(math.pi * progress))
    assert min(factor("linear", progress), factor("cosine", progress)) >= 0.0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_progress_outside_a_run_is_its_nearest_end(schedule: Schedule) -> None:
    assert factor(schedule, -0.5) == factor(schedule, 0.0)
    assert factor(schedule, 1.5) == factor(schedule, 1.0)


def test_a_decay_is_geometric_down_to_its_floor_and_never_below() -> None:
    coefficients = [decayed(0.1, 0.9, 0.02, updates) for updates in range(200)]
    assert coefficients == [max(0.02, 0.1 * 0.9**updates) for updates in range(200)]
    assert coefficients[0] == 0.1
    assert coefficients[15] > 0.02 == coefficients[16]
    assert min(coefficients) == 0.02
    assert decayed(0.1, 0.5, 0.0, 10_000) == 0.0


@pytest.mark.parametrize("initial", [0.01, 0.0, -0.1])
def test_a_decay_that_begins_below_its_floor_is_not_raised_to_it(initial: float) -> None:
    expected = [initial] * 3 if initial > 0.0 else [initial, initial / 2, initial / 4]
    assert [decayed(initial, 0.5, 0.05, updates) for updates in range(3)] == expected


@pytest.mark.parametrize("initial", [0.1, 0.0, -0.1])
def test_without_decay_the_initial_value_stays(initial: float) -> None:
    assert [decayed(initial, 1.0, 0.05, updates) for updates in (0, 7)] == [initial, initial]


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (0.0, 1.5e-3), (0.0049, 1.5e-3), (0.005, 1e-3), (0.01, 1e-3), (0.02, 1e-3), (0.0201, 1e-3 / 1.5),
        (7.0, 1e-3 / 1.5),
    ],
)  # fmt: skip
def test_the_rate_is_steered_outside_half_and_twice_the_target(divergence: float, expected: float) -> None:
    assert steered(1e-3, divergence, 0.01, (1e-6, 1e-2)) == expected


def test_a_steered_rate_stays_within_its_bounds() -> None:
    low = high = 1e-3
    for _ in range(40):
        low, high = steered(low, 1.0, 0.01, (1e-5, 1e-2)), steered(high, 0.0, 0.01, (1e-5, 1e-2))
    assert (low, high) == (1e-5, 1e-2)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)],
)
def test_a_penalty_follows_the_divergence(divergence: float, expected: float) -> None:
    assert adapted(0.05, divergence, 6.0, 100, 1000.0) == pytest.approx(0.05 * expected)
    assert adapted(0.05, 0.0, 6.0, 10_000, 1000.0) == 0.0
