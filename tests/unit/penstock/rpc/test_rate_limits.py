"""Token buckets, with a clock of the test's."""

import pytest

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.rpc.gate import (
    MAX_ALL_UNREAD_BYTES,
    MAX_CALLER_UNREAD_BYTES,
    MAX_CALLERS,
    MAX_DELAY_S,
    MAX_UNREAD_BYTES,
    SMALL_BYTES,
    Exceeded,
    RateLimits,
    Rates,
)


class Clock:
    """Moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


def limits(calls: float = 10, size: float = 1000 * MAX_MESSAGE_BYTES) -> tuple[RateLimits, Clock]:
    """Limits of so many calls and bytes a second."""
    clock = Clock()
    return RateLimits(Rates(calls=calls, bytes=size), clock), clock


def test_a_seconds_worth_passes_at_once_and_a_second_more_waits() -> None:
    found, _ = limits(calls=10)
    delays = [found.reserve("a", 1) for _ in range(20)]
    assert delays[:10] == [0.0] * 10
    assert delays[10:] == pytest.approx([0.1 * (index + 1) for index in range(10)])
    for _ in range(3):
        with pytest.raises(Exceeded, match=r"more than 10 calls"):
            found.reserve("a", 1)


def test_callers_do_not_pay_for_one_another() -> None:
    found, _ = limits(calls=2)
    for _ in range(4):
        found.reserve("loud", 1)
    with pytest.raises(Exceeded):
        found.reserve("loud", 1)
    assert found.reserve("quiet", 1) == 0.0


def test_time_fills_a_budget_up_to_a_seconds_worth() -> None:
    found, clock = limits(calls=10)
    for _ in range(20):
        found.reserve("a", 1)
    clock.now_s += 3600
    assert [found.reserve("a", 1) for _ in range(10)] == [0.0] * 10
    assert found.reserve("a", 1) > 0


def test_bytes_count_beside_calls_whichever_way_they_went() -> None:
    found, clock = limits(calls=1000, size=MAX_MESSAGE_BYTES)
    assert found.reserve("a", 2 * MAX_MESSAGE_BYTES) == 0.0
    assert found.reserve("a", MAX_MESSAGE_BYTES) == pytest.approx(MAX_DELAY_S)
    with pytest.raises(Exceeded, match="bytes a second"):
        found.reserve("a", MAX_MESSAGE_BYTES)
    clock.now_s += 10
    found.charge("a", 4 * MAX_MESSAGE_BYTES)
    with pytest.raises(Exceeded):
        found.reserve("a", 1)


def test_many_callers_take_bounded_memory() -> None:
    found, _ = limits()
    for index in range(3 * MAX_CALLERS):
        found.reserve(f"caller-{index}", 1)
    assert len(found) == MAX_CALLERS


def test_a_caller_that_reads_nothing_is_answered_no_more() -> None:
    found, _ = limits()
    first = found.keep("slow", "c-1", MAX_UNREAD_BYTES)
    with pytest.raises(Exceeded, match="read them first"):
        found.keep("slow", "c-1", 1)
    found.keep("other", "c-2", MIB)()
    first()
    found.keep("slow", "c-1", MAX_UNREAD_BYTES)()


def test_actors_that_share_a_certificate_read_side_by_side() -> None:
    found, _ = limits()
    most = MAX_CALLER_UNREAD_BYTES // MIB
    kept = [found.keep("gpu-3", f"c-{index}", MIB) for index in range(most)]
    with pytest.raises(Exceeded, match="read them first"):
        found.keep("gpu-3", "c-new", MIB)
    kept.pop()()
    found.keep("gpu-3", "c-new", MIB)()


def test_all_callers_together_leave_unread_no_more_than_a_server_can_keep() -> None:
    found, _ = limits()
    kept = [found.keep(f"c-{index}", "c", MIB) for index in range(MAX_ALL_UNREAD_BYTES // MIB)]
    with pytest.raises(Exceeded, match="of replies to all callers"):
        found.keep("honest", "c", MIB)
    found.keep("honest", "c", SMALL_BYTES)()
    kept.pop()()
    found.keep("honest", "c", MIB)()
