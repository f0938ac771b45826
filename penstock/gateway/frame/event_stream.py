"""Server-sent events, and how a request learns that its server has begun to end, or is full.

An answer that goes on for as long as its caller reads, or that waits for something, would hold the server up
until it is cancelled; the state of its scope tells it.
"""

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

STILL_HERE: Final = ": still here\n\n"
"""A comment: a connection that is gone is noticed by what is sent."""


def event(kind: str, data: Any, number: int | None = None) -> str:
    """Return an event as it is sent.

    data: JSON values. number: its id, which a browser that connects again repeats. Raises ValueError for NaN.
    """
    place = "" if number is None else f"id: {number}\n"
    return f"event: {kind}\n{place}data: {json.dumps(data, allow_nan=False)}\n\n"


ENDING: Final = "ending"
"""Name of the event among what a server hands to each request as its state."""
FULL: Final = "full"
"""Name of a function beside it, which tells whether the server has all the connections that it may have."""


def ending(scope: Scope) -> asyncio.Event:
    """Return the event, which is set once the server has begun to end; never where no server was told."""
    found: asyncio.Event = scope.get("state", {}).get(ENDING) or asyncio.Event()
    return found


def is_full(scope: Scope) -> bool:
    """Return whether the server has no room for a request; never where no server was told."""
    told: Callable[[], bool] | None = scope.get("state", {}).get(FULL)
    return told is not None and told()


@asynccontextmanager
async def until(ends: asyncio.Event, grace_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Give up the block `grace_s` seconds after the event; `expired` of what is yielded says that it was."""
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
"""Seconds that an answer which is under way may go on when its server ends: less than the server waits."""


class EventStream(StreamingResponse):
    """An answer of server-sent events; it ends with its server.

    grace_s: seconds that it goes on when the server has begun to end; 0 for one that has no end of its own.
    cut_off: event that is sent last where it ended before its events did. on_end: is called when it has
    ended, however.
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
