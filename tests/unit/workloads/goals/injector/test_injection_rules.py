"""Quiet hours, daily limit and auto."""

import time

import pytest

from penstock.workloads.goals.injection_journal import InjectionRules, is_quiet, quiet_minutes


def at(hour: int, minute: int) -> float:
    """A local time of some day, as Unix time."""
    return time.mktime((2026, 3, 10, hour, minute, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("hours", "quiet", "loud"),
    [
        ("22:00-06:30", [(22, 0), (23, 59), (0, 0), (6, 29)], [(6, 30), (12, 0), (21, 59)]),
        ("12:00-13:00", [(12, 0), (12, 59)], [(13, 0), (11, 59), (0, 0)]),
    ],
)
def test_quiet_hours_hold_from_their_first_minute_to_before_their_last(
    hours: str, quiet: list[tuple[int, int]], loud: list[tuple[int, int]]
) -> None:
    assert all(is_quiet(hours, at(*one)) for one in quiet)
    assert not any(is_quiet(hours, at(*one)) for one in loud)


@pytest.mark.parametrize("bad", ["", "22-6", "24:00-06:00", "22:00-06:60", "22:00-22:00", "22:00–06:00"])
def test_hours_that_are_none_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="quiet hours"):
        quiet_minutes(bad)


def test_the_first_rule_that_forbids_is_told() -> None:
    rules = InjectionRules(threshold=0.7, explore=0.0, daily_limit=3, quiet=["22:00-06:00"])
    assert rules.forbids(at(12, 0), 0, auto=False) == "auto is off"
    assert rules.forbids(at(23, 0), 0, auto=True) == "quiet hours"
    assert rules.forbids(at(12, 0), 3, auto=True) == "daily limit"
    assert rules.forbids(at(12, 0), 2, auto=True) == ""
