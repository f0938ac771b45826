"""A day with injectors on several hosts: goals succeed more often from hour to hour.

A policy server and a learner as processes, four simulated hosts whose faults arrive all the time, and a
policy that begins untrained. `python -m benchmarks.goals_day` plays it with eight, as `docs/goals.md` shows.
"""

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.goals_day import INTERVALS, play


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_goals_succeed_more_often_as_the_day_goes_on(tmp_path: Path) -> None:
    """By a fifth of all goals at least; every step that was acknowledged is in the books."""
    day = play(tmp_path, hosts=4, intervals=INTERVALS)
    hours = day.by_hour()
    print([round(one, 2) for one in hours], len(day.success))
    assert set(day.codes) == {0}
    assert day.summary["ledger"]["balanced"], day.summary["ledger"]
    assert day.summary["updates"] > 0
    assert fmean(hours[-6:]) > fmean(hours[:6]) + 0.2
