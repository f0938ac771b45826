"""Peers side by side: when a run was solved, and what the ratios are of."""

from typing import Any

import pytest

from benchmarks.peers import CARTPOLE, Contender, Outcome, first_solved, summarise


def contender(name: str, *, is_ours: bool = False) -> Contender:
    """One that is not run."""
    return Contender(name, run=outcome, is_ours=is_ours)


def outcome(steps_per_second: float, seconds: float | None = None) -> Outcome:
    """A run that was solved after `seconds`, whose processes kept one core busy."""
    shell = None if seconds is None else seconds + 1
    return Outcome(
        steps_per_second=steps_per_second,
        cpu_per_million=1e6 / steps_per_second,
        solved_s=seconds,
        from_shell_s=shell,
    )


def test_a_run_is_solved_by_a_hundred_episodes() -> None:
    lines: list[dict[str, Any]] = [
        {"episodes": 0, "mean_return": None},
        {"episodes": 99, "mean_return": 500.0},
        {"episodes": 100, "mean_return": 474.0},
        {"episodes": 120, "mean_return": 475.0},
        {"episodes": 130, "mean_return": 480.0},
    ]
    assert first_solved(lines, 475) == lines[3]
    assert first_solved(lines[:3], 475) is None


def test_a_ratio_is_of_medians_to_the_best_peer_of_each_column() -> None:
    contenders = [contender("ours", is_ours=True), contender("fast"), contender("clever")]
    outcomes = {
        "ours": [outcome(30, 4), outcome(10, 6), outcome(20, 5)],
        "fast": [outcome(10), outcome(10), outcome(10)],
        "clever": [outcome(5, 10), outcome(5, None), outcome(5, 30)],
    }
    ours, fast, clever = summarise(CARTPOLE, contenders, outcomes).rows
    assert list(ours[1:]) == ["3 of 3", 20, 2.0, 5, 0.25, 6, pytest.approx(6 / 21), 50_000, 0.5]
    assert list(fast[1:]) == ["0 of 3", 10, None, None, None, None, None, 100_000, None]
    assert list(clever[1:]) == ["2 of 3", 5, None, 20, None, 21, None, 200_000, None]


def test_without_peers_there_are_no_ratios() -> None:
    table = summarise(CARTPOLE, [contender("ours", is_ours=True)], {"ours": [outcome(10, 5)]}, ["fast"])
    assert list(table.rows[0][2:]) == [10, None, 5, None, 6, None, 100_000, None]
    assert "no environment: fast" in table.note
