"""The retry loop: capped exponential delay with full jitter, which can be interrupted.

No layer below retries: gRPC and Redis clients are constructed without retries.
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

BASE_S: Final = 0.05
CAP_S: Final = 5.0
_MAX_DOUBLINGS: Final = 30

_random = random.SystemRandom()


class Interrupted(Exception):
    """The process drains, and the repeated call was given up."""


def full_jitter(base_s: float = BASE_S, cap_s: float = CAP_S) -> Iterator[float]:
    """Yield delays in seconds without end, the n-th uniform in [0, min(cap_s, base_s · 2ⁿ)]."""
    attempt = 0
    while True:
        yield _random.uniform(0.0, min(cap_s, base_s * 2**attempt))
        attempt = min(attempt + 1, _MAX_DOUBLINGS)


def retry(
    call: Callable[[], T],
    *,
    retryable: Callable[[Exception], bool],
    stop: threading.Event,
    on_wait: Callable[[Exception, float], None] | None = None,
    give_up_s: float | None = None,
    delays: Iterator[float] | None = None,
) -> T:
    """Return the result of the first `call` that succeeds; it must be safe to repeat.

    retryable: whether an error may pass with time; one that may not is raised. stop: set when the process
    drains; it ends a wait at once, with Interrupted. on_wait: called with (error, delay in seconds) before
    each wait. give_up_s: seconds after which the last error is raised; None: never. delays: seconds between
    attempts; default `full_jitter()`.
    """
    pause = _pause(retryable, on_wait, give_up_s, delays or full_jitter())
    while not stop.is_set():
        try:
            return call()
        except Exception as error:
            delay = pause(error)
            if delay is None:
                raise
        stop.wait(delay)
    raise Interrupted


async def retry_async(
    call: Callable[[], Awaitable[T]],
    *,
    retryable: Callable[[Exception], bool],
    stop: asyncio.Event,
    on_wait: Callable[[Exception, float], None] | None = None,
    give_up_s: float | None = None,
    delays: Iterator[float] | None = None,
) -> T:
    """Return the result of the first `call` that succeeds, as `retry` does, for coroutines."""
    pause = _pause(retryable, on_wait, give_up_s, delays or full_jitter())
    while not stop.is_set():
        try:
            return await call()
        except Exception as error:
            delay = pause(error)
            if delay is None:
                raise
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await stop.wait()
    raise Interrupted


def _pause(
    retryable: Callable[[Exception], bool],
    on_wait: Callable[[Exception, float], None] | None,
    give_up_s: float | None,
    delays: Iterator[float],
) -> Callable[[Exception], float | None]:
    """Return a function that maps an error to the delay in seconds; None: give up."""
    end_s = math.inf if give_up_s is None else time.monotonic() + give_up_s

    def pause(error: Exception) -> float | None:
        left_s = end_s - time.monotonic()
        if not retryable(error) or left_s <= 0:
            return None
        delay = min(next(delays), left_s)
        if on_wait is not None:
            on_wait(error, delay)
        return delay

    return pause
