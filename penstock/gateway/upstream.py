"""The run behind a service: where it is, what it was begun with, and calls of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from penstock.client import (
    AsyncTextClient,
    DeadlinePassed,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyError,
    Unreachable,
)
from penstock.client.text_calls import DEADLINE_S
from penstock.gateway.frame.requests import ApiError
from penstock.rpc.auth import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddresses:
    """Says where the processes of a run are; "": not known, or not yet."""

    server: str = ""
    broker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Says what a run was begun with. task: `environment.kwargs`. registry: its URL, "" where not known.

    policy: under which its versions are registered; "": as its server says. folder: of the run; None where
    only addresses are known. false_alarm: of its canaries.
    """

    task: Mapping[str, Any]
    registry: str = ""
    policy: str = ""
    folder: Path | None = None
    false_alarm: float | None = None


class RunBehind:
    """A run that a site answers for. Entering finds or begins it; leaving ends it where it was begun here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave it as it is."""

    def addresses(self) -> RunAddresses:
        """Return where its processes are now; "" for those that have not come up."""
        raise NotImplementedError

    def settings(self) -> RunSettings | None:
        """Return what it was begun with, None while that is not known.

        Raises ConfigurationError for a folder that this user did not make.
        """
        raise NotImplementedError

    def failure(self) -> str:
        """Return why it is over although it was not asked to end; "" while it goes on, or is not known."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Tells an application which run it answers for.

    addresses: returns where the processes of the run are now; it may be asked at any time, from any thread.
    credentials: for calls to them. settings: returns what the run was begun with, None while it is not known;
    it raises ConfigurationError for those of a folder that this user did not make. state: folder in which the
    application may keep what it has to remember, made where it is not there; None: nowhere. agents: further
    runs by name, of a site that takes several.
    """

    addresses: Callable[[], RunAddresses]
    credentials: Credentials
    settings: Callable[[], RunSettings | None] = lambda: RunSettings(task={})
    state: Path | None = None
    agents: "Mapping[str, Upstream]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A command that learns from what people say of a run, which goes on beside the site.

    words: of `penstock`; the folder of the run comes behind them. check: raises ConfigurationError for
    options that the command would refuse when it begins. settings: of a run that is begun for it. options: of
    the command where the run is that of the site's own recipe.
    """

    words: tuple[str, ...]
    check: Callable[[Sequence[str]], None]
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


T = TypeVar("T")


async def answered(call: Awaitable[T]) -> T:
    """Return the result of a call of the run; raises ApiError for what it refuses and where it is silent."""
    try:
        return await call
    except ValueError as error:
        raise ApiError(422, str(error)) from error
    except PolicyError as error:
        raise of_run(error) from error


def of_run(error: PolicyError) -> ApiError:
    detail = str(error) if error.refusal is None else error.refusal.detail
    match error:
        case InvalidRequest():
            return ApiError(422, detail)
        case Overloaded():
            return ApiError(429, detail, retry_s=1)
        case NotAllowed():
            return ApiError(502, f"the run does not know this gateway: {detail}", error="bad_gateway")
        case DeadlinePassed():
            return ApiError(504, detail, error="timeout", retry_s=1)
        case NotReady() | Unreachable():
            return not_yet(detail)
        case _:
            return ApiError(502, detail, error="bad_gateway")


def not_yet(why: str) -> ApiError:
    """Return the answer of a site whose run is not ready. why: what is missing."""
    return ApiError(503, f"the run behind it is not ready: {why}; try again", retry_s=1)


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
