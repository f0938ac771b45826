"""The bound on staged bytes."""

import pytest

from penstock.broker.service.experience_service import StagingLimit
from penstock.protocol.refusal import Reason, Refused


def test_what_does_not_fit_is_refused_as_full_with_the_figures() -> None:
    limit = StagingLimit(100)
    limit.take(60)
    with pytest.raises(Refused, match="60 of 100 bytes in flight, 41 asked") as caught:
        limit.take(41)
    assert caught.value.refusal.reason is Reason.FULL
    assert caught.value.refusal.retry_after_ms > 0
    limit.take(40)
    assert limit.staged_bytes == 100
    limit.give_back(60)
    limit.take(60)


def test_one_append_larger_than_the_ceiling_passes_alone() -> None:
    limit = StagingLimit(10)
    limit.take(50)
    with pytest.raises(Refused):
        limit.take(1)
