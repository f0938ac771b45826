"""How a request learns that its server has begun to end, or is full: by the state of its scope.

An answer that goes on for as long as its caller reads, or that waits for something, would hold the server up
until it is cancelled.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from starlette.types import Scope

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
