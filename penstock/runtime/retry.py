"""The one retry loop: capped exponential delay with full jitter, and a way out.

Waits between attempts; `stop` ends a wait at once. Only errors that the caller names as retryable are
retried, and nothing below this layer retries (gRPC and Redis clients are built without).
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

BASE_S: Final = 0.05
CAP_S: Final = 5.0
_MAX_DOUBLINGS: Final = 30

_random = random.SystemRandom()


class Interrupted(Exception):
    """Reports that the process drains and the retried call was given up."""


def full_jitter(base_s: float = BASE_S, cap_s: float = CAP_S) -> Iterator[float]:
    """Yield endless delays in seconds, the n-th uniform in [0, min(cap_s, base_s · 2ⁿ)]."""
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
    """Return the result of the first `call` that succeeds.

    Args:
        call: the call to repeat; it must be safe to repeat.
        retryable: tells whether an error may pass with time.
        stop: set when the process drains; it ends a wait at once.
        on_wait: called with (error, delay in seconds) before each wait.
        give_up_s: seconds after which the last error is raised; None: never.
        delays: seconds between attempts; default `full_jitter()`.

    Raises:
        Interrupted: `stop` was set.
        Exception: the last error of `call`, when it is not retryable or `give_up_s` has passed.
    """
    delays = delays or full_jitter()
    started = time.monotonic()
    while not stop.is_set():
        try:
            return call()
        except Exception as error:
            if not retryable(error) or _is_over(started, give_up_s):
                raise
            delay = min(next(delays), _left_s(started, give_up_s))
            if on_wait is not None:
                on_wait(error, delay)
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
    """Return the result of the first `call` that succeeds, for coroutines.

    Arguments and errors are those of `retry`; Interrupted is raised when `stop` is set.
    """
    delays = delays or full_jitter()
    started = time.monotonic()
    while not stop.is_set():
        try:
            return await call()
        except Exception as error:
            if not retryable(error) or _is_over(started, give_up_s):
                raise
            delay = min(next(delays), _left_s(started, give_up_s))
            if on_wait is not None:
                on_wait(error, delay)
        await _wait_async(stop, delay)
    raise Interrupted


def _left_s(started: float, give_up_s: float | None) -> float:
    return math.inf if give_up_s is None else max(0.0, started + give_up_s - time.monotonic())


def _is_over(started: float, give_up_s: float | None) -> bool:
    return _left_s(started, give_up_s) <= 0


async def _wait_async(stop: asyncio.Event, delay_s: float) -> None:
    try:
        async with asyncio.timeout(delay_s):
            await stop.wait()
    except TimeoutError:
        return
