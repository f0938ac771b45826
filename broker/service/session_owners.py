"""A session belongs to the identity that opened it: no other appends to it, follows it or closes it.

Session numbers can be guessed, and a certificate of the run lets its holder call; so the row of a session
keeps who opened it, and every call that names a session is held against that. A session's owner never
changes within an incarnation of the run, so it is asked of Redis once and remembered. Sessions of callers
that proved nothing (plaintext) belong to anybody.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from penstock.rpc.identity import CALLER

MAX_REMEMBERED: Final = 16_384

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


def caller_name() -> str:
    """Return what a session's row keeps of its opener's identity; "" on a server that asks for none."""
    caller = CALLER.get()
    return "" if caller is None else str(caller)


class SessionOwners:
    """`read(session)` answers the owner of an open session, None where there is none.

    `confirm()` raises where the run is another incarnation than the one whose owners are remembered.
    """

    def __init__(
        self, read: Callable[[int], Awaitable[str | None]], confirm: Callable[[], Awaitable[None]]
    ) -> None:
        self._read, self._confirm = read, confirm
        self._owners: OrderedDict[int, str] = OrderedDict()

    async def check_name(self, actor_id: str, context: Context) -> None:
        """End the call PERMISSION_DENIED when the caller may not act under this name."""
        caller = CALLER.get()
        if caller is not None and not caller.may_act_as(actor_id):
            text = f"actor_id={actor_id!r}: {caller} may act as {caller.name!r} and {caller.name!r}-…"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    async def check(self, session: int, context: Context) -> None:
        """End the call PERMISSION_DENIED when the session is another's."""
        caller = caller_name()
        if not caller or not session:
            return
        owner = await self._owner(session)
        if owner and owner != caller:
            await self._confirm()
            text = f"session={session}: {caller} did not open it; open one of your own"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    def forget(self) -> None:
        """Ask again: in another incarnation of the run the numbers are those of other sessions."""
        self._owners.clear()

    async def _owner(self, session: int) -> str | None:
        known = self._owners.get(session)
        if known is not None:
            return known
        owner = await self._read(session)
        if owner is not None:
            self._owners[session] = owner
            while len(self._owners) > MAX_REMEMBERED:
                self._owners.popitem(last=False)
        return owner
