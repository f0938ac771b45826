"""A line: one connection to Redis on which calls do not wait for one another.

    ask ──► written at once ──► Redis ──► replies, in the order of the calls ──► each to its caller

redis-py writes and reads each call in a task with its own deadline; for many small scripts that costs a
broker more than everything else. Here one timer watches the whole line. The first call opens it, and the
first after it broke opens it again; calls that were in progress then fail and are not repeated here. A call
that is given up keeps its place: its reply is dropped when it comes.
"""

import asyncio
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import hiredis
from hiredis import pack_command
from redis.asyncio.connection import DefaultParser, parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.broker.log import keys
from penstock.broker.log.connection import CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S, check_url, without_password
from penstock.broker.log.replies import Appended, AppendItem
from penstock.broker.log.script import load
from penstock.protocol.limits import KIB
from penstock.rpc.identity import TlsFiles

Piece = bytes | memoryview
OnReply = Callable[[Any], None]
"""Called with the reply to a command, or with the exception in its place; raises nothing."""

_NOTHING: Final = object()
_JOINED_BYTES: Final = 128 * KIB
"""Pieces are joined up to so many bytes: a call of the system costs more than copying them. Larger ones go in
parts of this size, as the socket takes them: asyncio copies what the socket does not take, twice."""

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and times; they keep firewalls from dropping an idle line."""


class Line:
    """Calls of one event loop over one connection; connects on first use.

    url: `redis://`, `rediss://` or `unix:///path`. password: of the server, None where it asks for none.
    tls: certificates for `rediss://`, unless the URL names its own; read whenever the line is opened. Raises
    ValueError for another URL.
    """

    def __init__(self, url: str, password: str | None, tls: TlsFiles | None = None) -> None:
        self._address: dict[str, Any] = {"password": password} | dict(parse_url(check_url(url)))
        self._tls = _files(tls or TlsFiles(), self._address) if url.startswith("rediss://") else None
        self._shown = without_password(url)
        self._wire: _Wire | None = None
        self._is_due = False
        self._opening: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether a connection is open that `renew` has not given up."""
        return self._wire is not None and self._wire.is_open and not self._is_due

    async def open(self) -> None:
        """Connect unless connected; raises what `penstock.broker.log.connection.is_unavailable` judges."""
        while not self.is_open:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
                self._opening.add_done_callback(self._opened)
            # Others wait for it too.
            await asyncio.shield(self._opening)

    async def ask(self, *command: Any) -> Any:
        """Return the reply to one command; raises it where it is an error."""
        if not self.is_open:
            await self.open()
        return await _asked(self.write, command)

    def write(self, pieces: Iterable[Piece], on_replies: Sequence[OnReply | None]) -> None:
        """Write packed commands; calls each `on_reply` that is not None, also where the line is not open."""
        if self._wire is not None:
            self._wire.write(pieces, on_replies)
        else:
            _tell(on_replies, RedisConnectionError(f"{self._shown}: the line is not open"))

    def renew(self) -> None:
        """Have the next call open another connection; calls in progress end on this one."""
        self._is_due = True

    async def aclose(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._wire is not None:
            await self._wire.aclose()

    def _opened(self, opening: "asyncio.Task[None]") -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # those who wait have it; where nobody does, nobody has to

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                wire = await self._connect()
        except TimeoutError as error:
            raise RedisTimeoutError(f"{self._shown}: no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise RedisConnectionError(f"{self._shown}: {error}") from error
        try:
            for command in self._introduction():
                await _asked(wire.write, command)
        except BaseException:
            await wire.aclose()
            raise
        before, self._wire, self._is_due = self._wire, wire, False
        if before is not None:
            before.retire()

    async def _connect(self) -> "_Wire":
        loop, make = asyncio.get_running_loop(), partial(_Wire, self._shown)
        if "path" in self._address:
            _, wire = await loop.create_unix_connection(make, self._address["path"])
        else:
            host, port = self._address.get("host", "localhost"), self._address.get("port", 6379)
            _, wire = await loop.create_connection(make, host, port, ssl=self._context())
        return wire

    def _context(self) -> ssl.SSLContext | None:
        """What holds the server against the authority, else the system's, and its name against the URL's."""
        if self._tls is None:
            return None
        context = ssl.create_default_context(cafile=self._tls.authority)
        if self._tls.certificate is not None:
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        return context

    def _introduction(self) -> Iterable[tuple[Any, ...]]:
        user, password = self._address.get("username"), self._address.get("password")
        if user or password:
            yield ("AUTH", *filter(None, (user,)), password or "")
        if self._address.get("db"):
            yield ("SELECT", self._address["db"])
        yield ("EVAL", load("greet").source, 0, "")


class _Wire(asyncio.Protocol):
    """One connection, from when it was made until it broke or was closed."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=DefaultParser.parse_error, notEnoughData=_NOTHING)
        self._waiting: deque[OnReply | None] = deque()
        self._unsent: deque[Piece] = deque()
        self._is_full = False
        self._transport: Any = None
        self._heard_s = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self._broken: Exception | None = None
        self._retired = False
        self._closed = self._loop.create_future()

    @property
    def is_open(self) -> bool:
        return self._broken is None

    def write(self, pieces: Iterable[Piece], on_replies: Sequence[OnReply | None]) -> None:
        if self._broken is not None:
            _tell(on_replies, self._broken)
            return
        if not self._waiting:
            self._heard_s = self._loop.time()
        self._waiting.extend(on_replies)
        if self._silence is None:
            self._silence = self._loop.call_later(REPLY_TIMEOUT_S, self._look_for_silence)
        self._unsent.extend(_joined(pieces))
        self._send()

    def _send(self) -> None:
        while self._unsent and not self._is_full:
            piece = self._unsent.popleft()
            if len(piece) > _JOINED_BYTES:
                view = memoryview(piece)
                piece, rest = view[:_JOINED_BYTES], view[_JOINED_BYTES:]
                self._unsent.appendleft(rest)
            self._transport.write(piece)

    def retire(self) -> None:
        """Close once the last reply has come."""
        self._retired = True
        if not self._waiting:
            self._break(RedisConnectionError(f"{self._shown}: the connection was given up"))

    async def aclose(self) -> None:
        self._break(RedisConnectionError(f"{self._shown}: the connection was closed"))
        await self._closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(high=1, low=0)
        own = self._transport.get_extra_info("socket")
        if own.family != socket.AF_UNIX:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NOTHING:
                on_reply = self._waiting.popleft()
                if on_reply is not None:
                    on_reply(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self._break(RedisConnectionError(f"{self._shown}: no reply that Redis would send ({error})"))
        if self._retired:
            self.retire()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        # Bytes that Redis reads count as a sign of life, too: large payloads take their time.
        self._heard_s = self._loop.time()
        self._is_full = False
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self._break(RedisConnectionError(f"{self._shown}: {error or 'closed by Redis'}"))

    def _look_for_silence(self) -> None:
        self._silence = None
        if not self._waiting:
            return
        left_s = self._heard_s + REPLY_TIMEOUT_S - self._loop.time()
        if left_s > 0:
            self._silence = self._loop.call_later(left_s, self._look_for_silence)
        else:
            self._break(RedisTimeoutError(f"{self._shown}: no reply within {REPLY_TIMEOUT_S:g} s"))

    def _break(self, error: Exception) -> None:
        """Fail the calls in progress, once; `connection_lost` tells when the transport is closed."""
        if self._broken is not None:
            return
        self._broken = error
        if self._silence is not None:
            self._silence.cancel()
        self._transport.abort()
        self._unsent.clear()
        waiting, self._waiting = self._waiting, deque()
        _tell(waiting, error)


def _files(tls: TlsFiles, address: Mapping[str, Any]) -> TlsFiles:
    """Return the TLS files; those that the options of the URL name come first, as for other connections."""
    return TlsFiles(
        certificate=address.get("ssl_certfile", tls.certificate),
        key=address.get("ssl_keyfile", tls.key),
        authority=address.get("ssl_ca_certs", tls.authority),
    )


def _asked(write: Callable[..., None], command: tuple[Any, ...]) -> "asyncio.Future[Any]":
    reply = asyncio.get_running_loop().create_future()
    write((hiredis.pack_command(command),), (partial(answer, reply),))
    return reply


def answer(reply: "asyncio.Future[Any]", given: Any) -> None:
    """Hand a reply or an error to its caller, unless that waits no more."""
    if reply.done():
        return
    if isinstance(given, Exception):
        reply.set_exception(given)
    else:
        reply.set_result(given)


def _tell(on_replies: Iterable[OnReply | None], error: Exception) -> None:
    for on_reply in on_replies:
        if on_reply is not None:
            on_reply(error)


def _joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """The same bytes in fewer pieces; large ones are passed on as they are."""
    small: list[Piece] = []
    size = 0
    for piece in pieces:
        if small and size + len(piece) > _JOINED_BYTES:
            yield _join(small)
            small, size = [], 0
        small.append(piece)
        size += len(piece)
    yield _join(small)


def _join(pieces: Sequence[Piece]) -> Piece:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# ---- Batch appends to the log: calls that arrive while others are under way share a pipeline.

AT_ONCE: Final = 2
"""Pipelines under way at once: while Redis works on one, the next is written."""
MOST_CALLS: Final = 64
MOST_BYTES: Final = 4 * 2**20
"""Payload bytes in one pipeline, unless the first append alone has more."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """An append that waits for its turn. staged: one key for each payload. arguments: those of the script."""

    staged: Sequence[str]
    payloads: Sequence[bytes | memoryview]
    size: int
    arguments: Sequence[Any]
    reply: "asyncio.Future[Appended]"


class Appends:
    """Sends appends of one event loop to Redis, several in one pipeline."""

    def __init__(
        self, line: Line, staging_expiry_s: float, read: Callable[[Sequence[Any]], Appended]
    ) -> None:
        """line: nothing else travels on it, since what comes behind a large payload waits for it.

        read: makes of the script's answer what callers get, or raises it.
        """
        self._line, self._read = line, read
        self._set_tail = b"\r\n$2\r\nPX\r\n%b" % _bulk(b"%d" % max(1, round(staging_expiry_s * 1000)))
        self._nonce = secrets.token_hex(6)
        self._attempts = 0
        self._waiting: deque[_Waiting] = deque()
        self._under_way = 0
        self._is_due = False

    def begin(
        self, session: int, acked_through: int, items: Sequence[AppendItem], incarnation: str
    ) -> "asyncio.Future[Appended]":
        """Append fragments of a session on an open line; do not cancel the outcome.

        The payloads are staged under names of this attempt that expire, then the script moves them into place
        or drops them. It continues without its caller. incarnation: of the run that they were checked for.
        """
        arguments: list[Any] = [session, acked_through]
        payloads, size = [], 0
        for item in items:
            header, payload = item.header, item.payload
            arguments += (header.sequence, header.charge, int(header.kind), len(payload))
            arguments += (item.header_bytes, header.newest_version)
            payloads.append(payload)
            size += len(payload)
        arguments.append(incarnation)
        reply = asyncio.get_running_loop().create_future()
        first, self._attempts = self._attempts + 1, self._attempts + len(payloads)
        staged = [f"{keys.STAGING}{self._nonce}:{number}" for number in range(first, self._attempts + 1)]
        self._waiting.append(_Waiting(staged, payloads, size, arguments, reply))
        self._send_soon()
        return reply

    def _send_soon(self) -> None:
        """Send what waits, unless the greatest number of pipelines is in flight.

        Not at once: those who come in the same round of the loop go together, and on a line that broke, which
        answers as it is written to, each pipeline would be sent from within the one before.
        """
        if self._waiting and not self._is_due and self._under_way < AT_ONCE:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send the oldest waiting appends, until the greatest number of pipelines is in flight."""
        self._is_due = False
        while self._waiting and self._under_way < AT_ONCE:
            self._under_way += 1
            self._write(self._oldest())

    def _oldest(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        size = batch[0].size
        while self._waiting and len(batch) < MOST_CALLS:
            size += self._waiting[0].size
            if size > MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _write(self, batch: Sequence[_Waiting]) -> None:
        script, pieces = load("append").sha1, list[Piece]()
        on_replies: list[OnReply | None] = []
        for one in batch:
            for key, payload in zip(one.staged, one.payloads, strict=True):
                pieces += (_set_head(key, len(payload)), payload, self._set_tail)
                # A SET that failed (at `maxmemory`) is seen by the script as a staging key that is absent.
                on_replies.append(None)
            pieces.append(pack_command(("EVALSHA", script, len(one.staged), *one.staged, *one.arguments)))
            on_replies.append(partial(self._answered, one))
        on_replies[-1] = partial(self._ended, batch[-1])
        self._line.write(pieces, on_replies)

    def _ended(self, last: _Waiting, reply: Any) -> None:
        """Handle the last reply to a pipeline: the next one may be sent."""
        self._answered(last, reply)
        self._under_way -= 1
        self._send_soon()

    def _answered(self, one: _Waiting, reply: Any) -> None:
        if isinstance(reply, NoScriptError):
            whole = ("EVAL", load("append").source, len(one.staged), *one.staged, *one.arguments)
            self._line.write((pack_command(whole),), (partial(self._concluded, one),))
        else:
            self._concluded(one, reply)

    def _concluded(self, one: _Waiting, reply: Any) -> None:
        try:
            given = reply if isinstance(reply, Exception) else self._read(reply)
        except Exception as error:  # noqa: BLE001 - it is for those who wait
            given = error
        answer(one.reply, given)


def _set_head(key: str, size: int) -> bytes:
    """The command SET up to its value, which follows as it is."""
    return b"*5\r\n$3\r\nSET\r\n%b$%d\r\n" % (_bulk(key.encode()), size)


def _bulk(text: bytes) -> bytes:
    """An argument as it stands in a command."""
    return b"$%d\r\n%b\r\n" % (len(text), text)
