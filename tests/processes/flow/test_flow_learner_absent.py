"""There is no learner for a while: actors pause, nothing grows, no session ends; then they catch up."""

from pathlib import Path

import pytest

from tests.support.fleet.flow_scenarios import Report, absent_learner


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_actors_outwait_an_absent_learner(tmp_path: Path, seconds: int) -> None:
    absent_learner(tmp_path, seconds, Report())
