"""The bound on staged bytes."""

import pytest

from broker.service.staging import StagingLimit
from penstock.wire.refusal import Reason, Refused


def test_bytes_come_back_however_the_append_ends() -> None:
    """A failed append leaks nothing."""
    limit = StagingLimit(100)
    with pytest.raises(ZeroDivisionError), limit.reserve(60):
        raise ZeroDivisionError
    assert limit.staged_bytes == 0


def test_what_does_not_fit_is_refused_as_full_with_the_figures() -> None:
    """The caller is told to come back, and nothing is counted for it."""
    limit = StagingLimit(100)
    with limit.reserve(60):
        with (
            pytest.raises(Refused, match="60 of 100 bytes in flight, 41 asked") as caught,
            limit.reserve(41),
        ):
            pass
        assert caught.value.refusal.reason is Reason.FULL
        assert caught.value.refusal.retry_after_ms > 0
        with limit.reserve(40):
            assert limit.staged_bytes == 100


def test_one_append_larger_than_the_ceiling_passes_alone() -> None:
    """A small ceiling slows down and never blocks."""
    limit = StagingLimit(10)
    with limit.reserve(50), pytest.raises(Refused), limit.reserve(1):
        pass
