"""How a request learns that its server has begun to end: an event in the state of its scope.

An answer that goes on for as long as its caller reads, or that waits for something, would hold the server up
until it is cancelled.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.types import Scope

ENDING: Final = "ending"
"""Name of the event among what a server hands to each request as its state."""


def ending(scope: Scope) -> asyncio.Event:
    """Return the event, which is set once the server has begun to end; never where no server was told."""
    found: asyncio.Event = scope.get("state", {}).get(ENDING) or asyncio.Event()
    return found


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
