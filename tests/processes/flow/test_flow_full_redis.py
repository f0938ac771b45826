"""Redis filled to `maxmemory`: experience waits; lease, publish, commit and trim go on.

Then the flow does.
"""

from pathlib import Path

import pytest

from tests.support.fleet.flow_scenarios import Report, full_redis


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_all_that_frees_memory_goes_on_in_a_full_redis(tmp_path: Path, seconds: int) -> None:
    full_redis(tmp_path, seconds, Report())
