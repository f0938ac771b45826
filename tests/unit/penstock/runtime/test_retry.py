"""The one retry loop."""

import asyncio
import threading
from collections.abc import Callable
from itertools import islice, repeat

import pytest

from penstock.runtime.retry import Interrupted, full_jitter, retry, retry_async


def failing(times: int, error: Exception) -> Callable[[], str]:
    """A call that raises `error` so many times and then succeeds."""
    left = iter(range(times))

    def call() -> str:
        if next(left, None) is not None:
            raise error
        return "done"

    return call


def is_os_error(error: Exception) -> bool:
    """What these tests retry."""
    return isinstance(error, OSError)


def test_delays_lie_between_zero_and_the_doubling_cap() -> None:
    delays = list(islice(full_jitter(base_s=0.1, cap_s=1.0), 50))
    limits = [min(1.0, 0.1 * 2**n) for n in range(50)]
    assert all(0.0 <= delay <= limit for delay, limit in zip(delays, limits, strict=True))
    assert len(set(delays)) > 40


def test_a_call_is_repeated_until_it_succeeds() -> None:
    waits: list[float] = []
    result = retry(
        failing(2, OSError("down")),
        retryable=is_os_error,
        stop=threading.Event(),
        on_wait=lambda _error, delay_s: waits.append(delay_s),
        delays=repeat(0.001),
    )
    assert (result, len(waits)) == ("done", 2)


def test_what_is_not_retryable_is_raised_at_once() -> None:
    with pytest.raises(ValueError, match="wrong"):
        retry(failing(1, ValueError("wrong")), retryable=is_os_error, stop=threading.Event())


def test_giving_up_raises_the_last_error() -> None:
    with pytest.raises(OSError, match="down"):
        retry(
            failing(10**9, OSError("down")),
            retryable=is_os_error,
            stop=threading.Event(),
            give_up_s=0.02,
            delays=repeat(0.005),
        )


def test_stop_ends_a_long_wait_at_once() -> None:
    stop = threading.Event()
    with pytest.raises(Interrupted):
        retry(
            failing(10**9, OSError("down")),
            retryable=is_os_error,
            stop=stop,
            on_wait=lambda _error, _delay_s: stop.set(),
            delays=repeat(3600.0),
        )


async def test_the_asynchronous_twin_repeats_and_stops() -> None:
    call = failing(2, OSError("down"))

    async def succeed_later() -> str:
        return call()

    async def fail() -> str:
        raise OSError("down")

    stop = asyncio.Event()
    result = await retry_async(succeed_later, retryable=is_os_error, stop=stop, delays=repeat(0.001))
    assert result == "done"
    with pytest.raises(Interrupted):
        await retry_async(
            fail,
            retryable=is_os_error,
            stop=stop,
            on_wait=lambda _error, _delay_s: stop.set(),
            delays=repeat(3600.0),
        )
