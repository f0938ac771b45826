"""Few callers are told to ask again soon, many to ask seldom."""

from penstock.broker.service.experience_service import CALLS_PER_S, LEAST_S, MOST_S, RetryTimes


def calls_a_second(callers: int, seconds: float = 20.0) -> float:
    """How often all together ask when each does what it is told."""
    now_s, calls, due = 0.0, 0, [0.0] * callers
    retry_times = RetryTimes(lambda: now_s)
    while (now_s := min(due)) < seconds:
        due[due.index(now_s)] = now_s + retry_times.after_ms() / 1000
        calls += 1
    return calls / seconds


def test_one_or_two_ask_as_often_as_they_may() -> None:
    assert round(calls_a_second(1) * LEAST_S, 1) == 1.0
    assert calls_a_second(2) > 0.9 * 2 / LEAST_S


def test_ten_to_fifty_share_what_all_may_ask() -> None:
    for callers in (10, 50):
        assert 0.9 * CALLS_PER_S < calls_a_second(callers) < 1.1 * CALLS_PER_S


def test_a_crowd_waits_as_long_as_anybody_does() -> None:
    assert calls_a_second(1000, 3.0) < 1.2 * 1000 / MOST_S


def test_who_comes_after_a_pause_is_told_the_least() -> None:
    now_s = 0.0
    retry_times = RetryTimes(lambda: now_s)
    assert max(retry_times.after_ms() for _ in range(1000)) == MOST_S * 1000
    now_s = 5.0
    assert retry_times.after_ms() == LEAST_S * 1000
