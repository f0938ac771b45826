"""The client of the server of text behind a run: made with the first call, and anew where the run moves."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from penstock.client import AsyncTextClient
from penstock.client.text_client import DEADLINE_S
from penstock.gateway.sites.site import Upstream

REACH_S: Final = 2.0
"""Seconds for which a server of text that cannot be reached is tried again."""
_LOOK_S: Final = 1.0


class ServedText:
    """Used by one event loop.

    moved: called where another server answers from now on, or none: what the one before held is over.
    deadline_s: of a call. reach_s: for which a call tries a server that cannot be reached again.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        moved: Callable[[], None] | None = None,
        deadline_s: float = DEADLINE_S,
        reach_s: float = REACH_S,
    ) -> None:
        self._upstream, self._moved = upstream, moved
        self._deadline_s, self._reach_s = deadline_s, reach_s
        self._client: AsyncTextClient | None = None
        self._address = ""
        self._looked_s = -1.0

    async def client(self) -> AsyncTextClient | None:
        """Return the client; None where there is no server yet, or none any more."""
        now_s = time.monotonic()
        if self._client is None or now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            found = await asyncio.to_thread(self._upstream.addresses)
            if found.server != self._address:
                await self._go_to(found.server)
        return self._client

    async def close(self) -> None:
        """Close the connection; the server gives open conversations up after a while."""
        await self._go_to("")

    async def _go_to(self, address: str) -> None:
        made = self._made(address) if address else None
        before, self._client, self._address = self._client, made, address
        if self._moved is not None:
            self._moved()
        if before is not None:
            await before.close()

    def _made(self, address: str) -> AsyncTextClient:
        own = self._upstream.credentials
        return AsyncTextClient(
            address, credentials=own, policy="", reach_s=self._reach_s, deadline_s=self._deadline_s
        )
