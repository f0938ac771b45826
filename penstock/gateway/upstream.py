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
    """Addresses of the processes of a run; "": not known, or not yet."""

    server: str = ""
    broker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run. task: `environment.kwargs`. registry: its URL, "" if not known.

    policy: name of its versions in the registry; "": the name that its server reports. folder: of the run;
    None if only addresses are known. false_alarm: of its canaries.
    """

    task: Mapping[str, Any]
    registry: str = ""
    policy: str = ""
    folder: Path | None = None
    false_alarm: float | None = None


class RunBehind:
    """A run that a site serves. Entering finds or starts it; leaving ends it if it was started here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the run as it is."""

    def addresses(self) -> RunAddresses:
        """Return the current addresses of its processes; "" for those that are not up."""
        raise NotImplementedError

    def settings(self) -> RunSettings | None:
        """Return its settings, None while they are not known.

        Raises ConfigurationError for a folder that this user did not make.
        """
        raise NotImplementedError

    def failure(self) -> str:
        """Return why it ended by itself; "" while it runs, or if that is not known."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The run that an application serves, as the application sees it.

    addresses: returns the current addresses of the run's processes; may be called at any time from any
    thread. credentials: for calls to them. settings: returns the settings of the run, None while they are not
    known; raises ConfigurationError for a folder that this user did not make. state: folder for data of the
    application, made when needed; None: it may keep nothing. agents: further runs by name.
    """

    addresses: Callable[[], RunAddresses]
    credentials: Credentials
    settings: Callable[[], RunSettings | None] = lambda: RunSettings(task={})
    state: Path | None = None
    agents: "Mapping[str, Upstream]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A command that learns from feedback on a run while a site serves the run.

    words: arguments of `penstock`, before the folder of the run. check: raises ConfigurationError for options
    that the command would refuse. settings: of a run that is started for it. options: of the command if the
    run is started from the recipe of the site.
    """

    words: tuple[str, ...]
    check: Callable[[Sequence[str]], None]
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


T = TypeVar("T")


async def answered(call: Awaitable[T]) -> T:
    """Return the result of a call of the run; raises ApiError if the run refuses it or does not answer."""
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


def no_registry() -> ApiError:
    """Return the answer of a site that knows no registry in which to keep ratings."""
    detail = "the run's registry, which keeps ratings, is not known: serve the run by --run, or name its "
    return ApiError(409, f"{detail}registry.url with --set")


def not_yet(why: str) -> ApiError:
    """Return the error of a site whose run is not ready. why: what is missing."""
    return ApiError(503, f"the run behind it is not ready: {why}; try again", retry_s=1)


REACH_S: Final = 2.0
"""Seconds for which a call retries to reach a text server."""
_LOOK_S: Final = 1.0


class ServedText:
    """Client of the text server of a run, which follows its address; for one event loop.

    moved: called when the address changes or the server is gone: conversations at the former one are lost.
    deadline_s: of a call. reach_s: for which a call retries to reach the server.
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
        """Return the client; None while there is no server."""
        now_s = time.monotonic()
        if self._client is None or now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            found = await asyncio.to_thread(self._upstream.addresses)
            if found.server != self._address:
                await self._go_to(found.server)
        return self._client

    async def close(self) -> None:
        """Close the connection; the server drops open conversations after its timeout."""
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
