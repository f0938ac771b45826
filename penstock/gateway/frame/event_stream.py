"""Server-sent events, and how a request learns that its server shuts down, or is full.

An unending or waiting answer would delay the shutdown until it is cancelled. Therefore the server passes an
event in the state of each request.
"""

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

STILL_HERE: Final = ": still here\n\n"
"""A comment, which is sent to detect closed connections."""


def event(kind: str, data: Any, number: int | None = None) -> str:
    """Return an event as it is sent.

    data: JSON values. number: its id, which a browser that connects again repeats. Raises ValueError for NaN.
    """
    place = "" if number is None else f"id: {number}\n"
    return f"event: {kind}\n{place}data: {json.dumps(data, allow_nan=False)}\n\n"


ENDING: Final = "ending"
"""Key of the shutdown event in the state of a request."""
FULL: Final = "full"
"""Key of a function in that state, which returns whether the server has its most connections."""


def ending(scope: Scope) -> asyncio.Event:
    """Return the event that is set when the server shuts down; never set without an `EndingServer`."""
    found: asyncio.Event = scope.get("state", {}).get(ENDING) or asyncio.Event()
    return found


def is_full(scope: Scope) -> bool:
    """Return whether the server has its most connections; False without an `EndingServer`."""
    full: Callable[[], bool] | None = scope.get("state", {}).get(FULL)
    return full is not None and full()


@asynccontextmanager
async def until(ends: asyncio.Event, grace_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block `grace_s` seconds after the event; the yielded timeout is then `expired()`."""
    limit = asyncio.timeout(None)

    async def watch() -> None:
        await ends.wait()
        limit.reschedule(asyncio.get_running_loop().time() + grace_s)

    try:
        async with limit:
            watching = asyncio.create_task(watch())
            try:
                yield limit
            finally:
                watching.cancel()
    except TimeoutError:
        if not limit.expired():
            raise


# ---- The answer that is a stream of server-sent events.

ANSWER_S: Final = 4.0
"""Seconds that a finite answer may continue during shutdown: less than the server waits."""


class EventStream(StreamingResponse):
    """An answer of server-sent events, which ends when its server shuts down.

    grace_s: seconds that it may continue during shutdown; 0 for an unending stream. cut_off: last event of a
    stream that was cut off. on_end: called when the answer has ended, also by an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterable[str] | AsyncIterable[bytes],
        status_code: int = 200,
        *,
        grace_s: float = 0.0,
        cut_off: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(events, status_code)
        self._grace_s, self._cut_off, self._on_end = grace_s, cut_off, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._ending = ending(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with until(self._ending, self._grace_s) as limit:
            async for one in self.body_iterator:
                body = one.encode() if isinstance(one, str) else one
                await send({"type": "http.response.body", "body": body, "more_body": True})
        last = self._cut_off if limit.expired() else ""
        await send({"type": "http.response.body", "body": last.encode(), "more_body": False})
