"""Actors that make twice as much as the learner takes: they wait, and nothing is evicted, lost or too old."""

from pathlib import Path

import pytest

from tests.support.fleet.flow_scenarios import Report, overload


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_twice_overload_with_a_small_buffer(tmp_path: Path, seconds: int) -> None:
    overload(tmp_path, seconds, Report())
