"""One person asks for so much in a minute, whatever others do."""

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.gateway.frame.requests import ApiError
from penstock.workloads.chat.http.chat_api import MessageLimit


def test_a_person_waits_and_others_do_not() -> None:
    clock = [0.0]
    limit = MessageLimit(2, lambda: clock[0])
    limit.count("ann")
    clock[0] = 10.0
    limit.count("ann")
    for _ in range(5):
        with pytest.raises(ApiError) as refused:
            limit.count("ann")
        assert (refused.value.status, refused.value.retry_s) == (429, 50.0)
    limit.count("bob")
    clock[0] = 60.0
    limit.count("ann")
    with pytest.raises(ApiError):
        limit.count("ann")
