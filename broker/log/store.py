"""The run in Redis as the gRPC services use it (asyncio).

Every method is one round trip of one script (`penstock.broker.log.line`: several in one). A method either
returns a reply, refusals included, or raises `StoreUnavailable`: then it is unknown whether the call took
effect, and repeating it is safe. The process keeps no state but the incarnation of the run that it knows: a
call that was made for another incarnation is not done. Any number of stores share one Redis.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

from redis.exceptions import NoScriptError

from penstock.broker.log import keys, replies
from penstock.broker.log.connection import connect_async, is_unavailable
from penstock.broker.log.line import Appends, Line
from penstock.broker.log.script import Script, load
from penstock.protocol.limits import STAGING_EXPIRY_S
from penstock.protocol.messages import Publication, Report, Role, RunState, Watch
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.rpc.identity import TlsFiles
from penstock.runtime.failpoint import failpoint

CHANGES_HEARTBEAT_S: Final = 1.0
_RESUBSCRIBE_S: Final = 0.2


class StoreUnavailable(Exception):
    """Redis did not answer, is loading, refused a write, or holds another incarnation of the run."""


class OtherRelease(StoreUnavailable):
    """The run in Redis has keys of a later layout: this process must not go on."""


class Store:
    """The broker's operations in Redis; every method may raise `StoreUnavailable`. Made by `connect`."""

    def __init__(self, client: Any, calls: Line, appends: Line, staging_expiry_s: float) -> None:
        """calls: line for scripts. appends: sends the fragments. client: connection for everything else."""
        self._redis, self._line, self._append_line = client, calls, appends
        self._appends = Appends(appends, staging_expiry_s, self._read_append)
        self._incarnation = ""
        self._forget: list[Callable[[], None]] = []

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        password: str | None = None,
        tls: TlsFiles | None = None,
        staging_expiry_s: float = STAGING_EXPIRY_S,
    ) -> "Store":
        """Return a store that opens no connection yet. staging_expiry_s: lifetime of staged payloads."""
        lines = Line(url, password, tls), Line(url, password, tls)
        return cls(connect_async(url, password, tls), *lines, staging_expiry_s)

    async def aclose(self) -> None:
        for line in (self._line, self._append_line):
            await line.aclose()
        await self._redis.aclose(close_connection_pool=True)

    async def open_session(self, actor_id: str, role: Role, owner: str = "") -> replies.Opened | Refusal:
        """Draw a session number and close the actor's previous session. owner: identity that opens it.

        Refusals: NOT_READY (no specification yet, or the log waits to be opened again), RUN_CLOSED.
        """
        return replies.opened(await self._run("open_session", actor_id, role.value, owner))

    def on_incarnation(self, forget: Callable[[], None]) -> None:
        """Call `forget` when Redis holds another incarnation than the known one; default: accept any."""
        self._forget.append(forget)

    async def confirm(self) -> None:
        """Raise StoreUnavailable unless Redis holds the incarnation that is known here."""
        await self._run("confirm")

    async def owner_of(self, session: int) -> str | None:
        """Return the owner of an open session, None when no such session is open."""
        owner = await self._read("HGET", f"{keys.SESSION}{session}", "owner")
        return None if owner is None else owner.decode()

    async def append(
        self, session: int, acked_through: int, items: Sequence[replies.AppendItem]
    ) -> replies.Appended:
        await self.open()
        return await self.outcome(self.begin_append(session, acked_through, items))

    async def open(self) -> None:
        if not self._append_line.is_open:
            await self._guarded(self._append_line.open)

    def begin_append(
        self, session: int, acked_through: int, items: Sequence[replies.AppendItem]
    ) -> "asyncio.Future[replies.Appended]":
        """Append checked fragments with consecutive sequence numbers, each at most once.

        Call it right after `open`, and get its reply from `outcome`: it continues without its caller.
        Refusals for the first fragment not taken: FULL (detail log_bytes, log_entries, staging, pacing,
        closed), GAP(expected), INVALID, EXPIRED, FENCED.
        """
        failpoint("append.sending", items[-1].header.sequence if items else 0)
        return self._appends.begin(session, acked_through, items, self._remembered())

    async def outcome(self, begun: "asyncio.Future[replies.Appended]") -> replies.Appended:
        appended: replies.Appended = await self._guarded(lambda: asyncio.shield(begun))
        return appended

    def _read_append(self, answer: Sequence[Any]) -> replies.Appended:
        appended = replies.appended(self._open(answer))
        failpoint("append.stored", appended.acked_through)
        return appended

    async def close_session(self, session: int) -> None:
        """End a session; its credit returns to the budget. Safe to repeat."""
        await self._run("close_session", session)

    async def report(self, report: Report) -> tuple[int, Refusal | None]:
        """Store finished episodes for the learner.

        Returns (last report taken, refusal of the next one or None): FULL(closed), GAP(expected), INVALID for
        an evaluation of a session of another role, EXPIRED, FENCED.
        """
        given = (report.session, report.sequence, report.encode(), int(report.evaluation))
        return replies.reported(await self._run("report", *given))

    async def watch(self, watch: Watch) -> replies.Watched:
        """Renew the session, note which versions it uses, and grant or take back credit; never waits."""
        answer = ""
        if watch.probe_log_prob:
            answer = json.dumps([watch.applied_version, watch.applied_sha256, list(watch.probe_log_prob)])
        begun, gives_back = watch.begun_through, int(watch.gives_back)
        reply = await self._run(
            "watch", watch.session, begun, watch.applied_version, answer, gives_back, watch.flushed
        )
        return replies.watched(reply)

    async def specification(self) -> bytes | None:
        return await self._read("GET", keys.SPECIFICATION)

    async def begin_fetch(self, session: int, known_version: int) -> Publication | None:
        """Return the publication that a session is to fetch and keep its bytes; None: nothing newer."""
        version, value = await self._run("begin_fetch", session, known_version)
        return replies.publication(int(version), value) if version else None

    async def note_fetch(self, session: int, version: int, offset: int) -> Publication | None:
        """Renew a session that fetches a version; return the publication of the version.

        None where its bytes are no longer stored. offset: first byte of the requested chunk. With the last
        chunk the fetch is complete.
        """
        value = await self._run("note_fetch", session, version, offset)
        return None if value is None else replies.publication(version, value)

    async def publication(self, version: int) -> Publication | None:
        value = await self._read("HGET", keys.PUBLICATIONS, str(version))
        return None if value is None else replies.publication(version, value)

    async def weights_chunk(self, version: int, index: int) -> bytes | None:
        """Return chunk `index` (of WEIGHT_CHUNK_BYTES) of a version, or None."""
        return await self._read("GET", keys.weights(version, index))

    async def status(self) -> replies.Status:
        return replies.status(await self._run("status"))

    async def control(self, action: replies.ControlAction, reason: str = "") -> tuple[int, RunState]:
        """Write the desired state; returns (revision, state now wanted). STOPPING cannot be revoked.

        action: pause, resume or stop. reason: of the operator, for the audit. Raises Refused(NOT_READY)
        before a learner took the lease.
        """
        reply = await self._run("control", action, reason)
        if reply[0] != b"OK":
            raise Refused(Refusal(reason=Reason.NOT_READY, detail="no learner has taken the run yet"))
        return int(reply[1]), RunState(int(reply[2]))

    async def command(
        self, action: replies.CommandAction, argument: str, request_id: str, reason: str = ""
    ) -> tuple[replies.Command, bool]:
        """Note a command for the learner; return it as it stands, and whether the id was new.

        Raises Refused: NOT_READY before a learner took the lease, INVALID where the id names another command,
        FULL where too many wait.
        """
        reply = await self._run("command", request_id, action, argument, reason)
        if reply[0] == b"OK":
            return replies.Command.from_reply(reply[1]), bool(reply[2])
        raise Refused(replies.command_refusal(reply, request_id))

    async def changes(self) -> AsyncIterator[replies.Change | None]:
        """Yield every change that may end a wait; None once a second where there was none.

        It subscribes again by itself when the connection breaks; the change that follows concerns all
        sessions and covers those that were missed.
        """
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    await subscription.subscribe(keys.CHANGED)
                    yield replies.Change()
                    while True:
                        message = await subscription.get_message(
                            ignore_subscribe_messages=True, timeout=CHANGES_HEARTBEAT_S
                        )
                        yield None if message is None else replies.change(message["data"])
            except Exception as error:
                if not is_unavailable(error):
                    raise
            await asyncio.sleep(_RESUBSCRIBE_S)

    async def _read(self, *command: str) -> bytes | None:
        value: bytes | None = await self._guarded(lambda: self._redis.execute_command(*command))
        return value

    async def _run(self, name: str, *arguments: Any) -> Any:
        script, known = load(name), self._remembered()
        return self._open(await self._guarded(lambda: self._evaluate(script, (*arguments, known))))

    def _remembered(self) -> str:
        return self._incarnation if self._forget else ""

    def _open(self, answer: Sequence[Any]) -> Any:
        try:
            incarnation, reply = replies.unpack(answer)
        except replies.OtherIncarnation as error:
            self._meet(error.incarnation)
            raise StoreUnavailable(str(error)) from error
        except replies.OtherLayout as error:
            raise (StoreUnavailable if error.is_earlier else OtherRelease)(str(error)) from error
        if not self._incarnation:
            self._meet(incarnation)
        return reply

    def _meet(self, incarnation: str) -> None:
        if incarnation == self._incarnation:
            return
        self._incarnation = incarnation
        for forget in self._forget:
            forget()

    async def _evaluate(self, script: Script, arguments: Sequence[Any]) -> Any:
        try:
            return await self._line.ask("EVALSHA", script.sha1, 0, *arguments)
        except NoScriptError:
            return await self._line.ask("EVAL", script.source, 0, *arguments)

    async def _guarded(self, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except Exception as error:
            if not is_unavailable(error):
                raise
            # Idle connections fail in the same way: the next call opens a new one.
            self._line.renew()
            self._append_line.renew()
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
