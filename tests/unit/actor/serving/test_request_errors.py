"""What could not be answered is in the log under its request's id, and does not fill it."""

import logging
from typing import Any

import pytest

from penstock.actor.serving.batcher import NotFinite
from penstock.actor.serving.request_handler import EVERY_S, RequestErrors
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import loaded_of, question_of, specification

OVERLOADED = Refused(Refusal(reason=Reason.OVERLOADED, detail="70 observations wait", retry_after_ms=9))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of what was logged."""
    return [record.__dict__ for record in caplog.records]


def test_one_line_of_a_kind_in_ten_seconds_counts_the_others(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    request_errors = RequestErrors(lambda: now[0])
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            request = pb.ActRequest(request_id=f"r-{number}", episode_id="e-1")
            assert request_errors.refused(request, OVERLOADED).retry_after_ms == 9
        request_errors.refused(
            pb.DescribeRequest(), Refused(Refusal(reason=Reason.INVALID, detail="policy=x"))
        )
        now[0] += EVERY_S
        request_errors.refused(pb.RewardRequest(request_id="late"), OVERLOADED)
    told = [
        (one["reason"], one.get("client_request_id"), one.get("episode_id"), one["others"])
        for one in lines(caplog)
    ]
    assert told == [
        ("overloaded", "r-0", "e-1", 0),
        ("invalid", None, None, 0),
        ("overloaded", "late", None, 999),
    ]


def test_a_version_that_fails_is_named_with_the_request_that_met_it(caplog: pytest.LogCaptureFixture) -> None:
    question = question_of(request_id="r-7")
    RequestErrors().failed(
        loaded_of(specification(), version=9), question, NotFinite("version 9: not finite")
    )
    (line,) = lines(caplog)
    assert (line["version"], line["client_request_id"]) == (9, "r-7")
    assert line["levelno"] == logging.ERROR
    assert line["exc_info"] is not None


def test_a_text_of_the_callers_is_in_the_reply_and_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refused = Refused(Refusal(reason=Reason.INVALID, detail="'hunter2' is no word", logged="a word is none"))
    with caplog.at_level(logging.INFO):
        assert RequestErrors().refused(pb.DescribeRequest(), refused).detail == "'hunter2' is no word"
    (line,) = lines(caplog)
    assert line["detail"] == "a word is none"
