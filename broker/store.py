"""The run in Redis as the gRPC services use it (asyncio).

Every method is one round trip of one script (Append: one pipeline). A method either returns a reply,
refusals included, or raises `StoreUnavailable`: then nobody knows whether the call took effect, and
repeating it is safe. Nothing is kept in the process: any number of stores share one Redis.
"""

from collections.abc import AsyncIterator, Sequence

from broker.state import (
    Appended,
    AppendItem,
    ControlAction,
    Opened,
    Status,
    Watched,
)
from penstock.wire.messages import Publication, Report, Role, RunState, Watch
from penstock.wire.refusal import Refusal


class StoreUnavailable(Exception):
    """Redis did not answer, is loading, or refused a write; the message says which."""


class Store:
    """See the module. Build with `Store.connect`; close with `aclose`."""

    @classmethod
    def connect(cls, url: str, *, password: str | None = None, staging_expiry_s: int = 60) -> "Store":
        """A store on `redis://`, `rediss://` or `unix://`; opens no connection yet."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close every connection."""

    async def ping(self) -> None:
        """Return when Redis answers; raises StoreUnavailable."""

    async def open_session(self, actor_id: str, role: Role) -> Opened | Refusal:
        """Draw a session number and close the actor's previous session.

        Refusals: NOT_READY (no specification yet, or the log waits to be re-opened), RUN_CLOSED.
        """
        raise NotImplementedError

    async def append(self, session: int, acked_through: int, items: Sequence[AppendItem]) -> Appended:
        """Append checked fragments with consecutive sequence numbers, each at most once.

        Refusals for the first not taken: FULL (detail log_bytes, log_entries, staging, pacing, closed),
        GAP(expected), INVALID, EXPIRED, FENCED, NOT_READY.
        """
        raise NotImplementedError

    async def close_session(self, session: int) -> None:
        """End a session; its leave goes back to the budget. Safe to repeat."""

    async def report(self, report: Report) -> tuple[int, Refusal | None]:
        """Keep finished episodes for the learner: (last report taken, why this one was not)."""
        raise NotImplementedError

    async def watch(self, watch: Watch) -> Watched:
        """Renew the session, note what it serves, grant leave; never waits."""
        raise NotImplementedError

    async def publication(self, version: int) -> Publication | None:
        """The publication of a version whose bytes are still there, else None."""
        raise NotImplementedError

    async def weights_chunk(self, version: int, index: int) -> bytes | None:
        """Chunk `index` (of WEIGHT_CHUNK_BYTES) of a version, or None."""
        raise NotImplementedError

    async def status(self) -> Status:
        """The run at one moment."""
        raise NotImplementedError

    async def control(self, action: ControlAction, reason: str = "") -> tuple[int, RunState]:
        """Write the desired state: (revision, state wanted now). STOPPING is not taken back."""
        raise NotImplementedError

    def changes(self) -> AsyncIterator[None]:
        """Yield after every change that may end somebody's wait, and once a second in any case."""
        raise NotImplementedError
