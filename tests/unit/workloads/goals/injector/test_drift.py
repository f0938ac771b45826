"""A fall of the success rate is seen, and chance is not taken for one."""

import numpy as np
import pytest

from penstock.workloads.goals.injector import NEWEST, drifted


def seen(rates: list[tuple[float, int, int]], seed: int = 0) -> tuple[list[bool], list[int]]:
    """Outcomes of (rate, count, version)."""
    random = np.random.default_rng(seed)
    pairs = [(bool(random.random() < rate), version) for rate, count, version in rates for _ in range(count)]
    return [one for one, _ in pairs], [version for _, version in pairs]


def test_a_version_that_fails_more_often_is_named_with_both_counts() -> None:
    successes, versions = seen([(0.9, 200, 1), (0.2, NEWEST, 2)])
    assert "version 2" in drifted(successes, versions)
    assert "of the last 30" in drifted(successes, versions)
    assert not drifted(successes[:203], versions[:203])


@pytest.mark.parametrize(("before", "after", "share"), [(0.9, 0.3, 0.95), (0.8, 0.2, 0.9)])
def test_a_deep_fall_is_seen_within_thirty_goals(before: float, after: float, share: float) -> None:
    found = 0
    for seed in range(100):
        successes, versions = seen([(before, 200, 1), (after, NEWEST, 2)], seed)
        found += any(drifted(successes[:end], versions[:end]) for end in range(201, 231))
    assert found >= 100 * share


def test_versions_that_change_with_every_goal_are_judged_together() -> None:
    successes, versions = seen([(0.9, 200, 1), *((0.3, 1, 2 + i) for i in range(NEWEST))])
    assert drifted(successes, versions)


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_rate_and_a_better_one_are_no_drift(seed: int) -> None:
    successes, versions = seen([(0.7, 200, 1), (0.7, 100, 2), (0.9, 100, 3)], seed)
    assert not any(drifted(successes[:count], versions[:count]) for count in range(401))


def test_too_few_goals_say_nothing() -> None:
    assert not drifted([], [])
    assert not drifted([True] * 40 + [False] * 30, [1] * 40 + [2] * 30)
