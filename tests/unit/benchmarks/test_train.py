"""Start-up: when the first update was, out of a learner's log."""

import pytest

from benchmarks.train import FIRST_UPDATE, logged_at_s

LOG = """2026-01-02T03:04:05.250Z info learner lease acquired epoch=1
2026-01-02T03:04:06.750Z info learner learning ended why=steps env_steps=988
2026-01-02T03:04:09.000Z info learner checkpoint committed position=2
"""


def test_the_time_of_a_line_is_read_to_the_millisecond() -> None:
    assert logged_at_s(LOG, FIRST_UPDATE) - logged_at_s(LOG, "lease acquired") == 1.5
    assert logged_at_s(LOG, "lease acquired") == 1767323045.25


def test_a_line_that_is_missing_is_told() -> None:
    with pytest.raises(ValueError, match="has no 'learning ended'.*acquired"):
        logged_at_s(LOG.splitlines()[0], FIRST_UPDATE)
