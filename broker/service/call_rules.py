"""Rules of the broker's calls: how they are bounded, read and answered, and what every handler checks.

The first three are given only where calls differ.
"""

from typing import Final

from penstock.broker.log.store import StoreUnavailable
from penstock.broker.service.calls_in_flight import CallsInFlight
from penstock.protocol import append
from penstock.protocol.limits import (
    APPEND_DEADLINE_S,
    CALL_DEADLINE_S,
    KIB,
    MAX_MESSAGE_BYTES,
    MAX_NUMBER,
    MAX_WATCH_WAIT_MS,
    WATCH_GRACE_S,
)
from penstock.protocol.refusal import Reason, Refusal
from penstock.rpc.boundary import Boundary, CallRule, Malformed
from penstock.runtime import metrics

REDIS_DOWN_RETRY_MS: Final = 500
LARGEST_CALL_BYTES: Final = 16 * KIB
"""Largest request of a call without a rule of its own: a parser makes an object of two bytes."""
ORDINARY: Final = CallRule(largest_bytes=LARGEST_CALL_BYTES, deadline_s=CALL_DEADLINE_S)


RULES: Final = {
    "Append": CallRule(largest_bytes=MAX_MESSAGE_BYTES, deadline_s=APPEND_DEADLINE_S, parse=append.parse),
    # 256 KiB hold the largest report.
    "ReportEpisodes": CallRule(largest_bytes=256 * KIB, deadline_s=CALL_DEADLINE_S),
    "WatchLatest": CallRule(
        largest_bytes=LARGEST_CALL_BYTES,
        deadline_s=MAX_WATCH_WAIT_MS / 1000 + WATCH_GRACE_S,
        writes_bytes=True,
    ),
    "GetWeights": CallRule(largest_bytes=LARGEST_CALL_BYTES, deadline_s=CALL_DEADLINE_S, writes_bytes=True),
}


def build_boundary() -> Boundary:
    """The boundary of one broker."""
    return Boundary(
        RULES,
        ordinary=ORDINARY,
        process="broker",
        unavailable={StoreUnavailable: "redis"},
        in_flight=CallsInFlight().serving,
        on_malformed=metrics.REFUSALS.labels(reason="malformed").inc,
    )


def redis_down(reason: Reason, error: StoreUnavailable) -> Refusal:
    """The refusal that callers get while Redis does not answer."""
    return Refusal(reason=reason, detail=f"redis: {error}", retry_after_ms=REDIS_DOWN_RETRY_MS)


def check_number(field: str, value: int) -> None:
    """Raise Malformed unless `value` is one that the broker gives: 1 .. 2^53."""
    if not 1 <= value <= MAX_NUMBER:
        raise Malformed(f"{field}={value}: give the number that the broker gave, from 1 to 2^53")
