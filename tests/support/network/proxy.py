"""A bad network between two real processes: a TCP or unix-socket proxy that a test commands.

It forwards bytes between clients and one server and knows nothing of what they mean, but for where a reply
begins: a HEADERS frame on a new stream of HTTP/2, or any bytes of a server that does not speak HTTP/2. So a
reply is lost as a network loses it: the server has done its work and answered, and the connection is gone.
`set` changes what happens from now on, on open connections too; `reset`, `half_open` and `close` act once.
The proxy runs in a thread of its own; its methods may be called from any thread.

    client ──► delay ─► throttle ─► reset? ──────────────► server
           ◄── reset? ◄─ throttle ◄─ delay ◄─ lose reply? ◄──
"""

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

_PIECE_BYTES: Final = 16 * 1024
_BUFFERED_PIECES: Final = 16
_LINGER_NONE: Final = struct.pack("ii", 1, 0)
_FRAME_HEADER_BYTES: Final = 9
_HEADERS: Final = 1
_GOAWAY: Final = 7
_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What the network does. Chances are per reply (`lose_replies`) and per piece of bytes (`reset`)."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """A piece is late by delay ± jitter; order is kept."""
    lose_replies: float = 0.0
    reset: float = 0.0
    bytes_per_s: float = 0.0
    """Each way of each connection; 0: as fast as it goes."""
    line_bytes_per_s: float = 0.0
    """What the server says on all connections together; 0: as fast as it goes."""
    blackhole: bool = False
    """Connections are accepted and kept, and nothing passes."""
    refuse: bool = False
    """New connections are reset at once."""


class Replies:
    """Counts the replies that begin in what a server says, and its goodbyes (GOAWAY)."""

    def __init__(self, *, http2: bool) -> None:
        self._http2 = http2
        self.goodbyes = 0
        self._head = b""
        self._skip = 0
        self._answered: set[int] = set()

    def begun(self, data: bytes) -> int:
        if not self._http2:
            return 1
        found = 0
        while data:
            if self._skip:
                passed = min(self._skip, len(data))
                self._skip, data = self._skip - passed, data[passed:]
                continue
            wanted = _FRAME_HEADER_BYTES - len(self._head)
            self._head, data = self._head + data[:wanted], data[wanted:]
            if len(self._head) == _FRAME_HEADER_BYTES:
                found += self._is_new_reply(self._head)
                self._skip, self._head = int.from_bytes(self._head[:3]), b""
        return found

    def _is_new_reply(self, head: bytes) -> bool:
        """The trailers of a stream are HEADERS as well: only its first frame counts."""
        self.goodbyes += head[3] == _GOAWAY
        stream = int.from_bytes(head[5:9]) & 0x7FFFFFFF
        if head[3] != _HEADERS or stream in self._answered:
            return False
        self._answered.add(stream)
        return True


class Proxy(threading.Thread):
    """Use as a context manager. Listens on TCP, or beside an upstream `unix:/path` on a socket of its own."""

    def __init__(self, upstream: str, *, seed: int = 0, http2: bool = True) -> None:
        super().__init__(name="proxy", daemon=True)
        self.upstream, self.faults = upstream, Faults()
        self.accepted_s: list[float] = []
        """Monotonic time of every connection accepted."""
        self.goodbyes = self.replies = self.lost_replies = self.resets = self.bytes_forwarded = 0
        self.connections: set[Connection] = set()
        self.address = ""
        self.random, self.http2 = random.Random(seed), http2
        self.passable = asyncio.Event()
        self.passable.set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._line_free_s = 0.0

    def __enter__(self) -> Self:
        self.start()
        self._in_loop(self._listen())
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(self) -> None:
        """The thread: the event loop."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def set(self, **faults: Any) -> None:
        """Change the named faults; the others stay as they are."""
        self.faults = replace(self.faults, **faults)
        turn = self.passable.clear if self.faults.blackhole else self.passable.set
        self._loop.call_soon_threadsafe(turn)

    def heal(self) -> None:
        """No faults any more; what was half-opened stays so."""
        self.set(**asdict(Faults()))

    def reset(self) -> int:
        """Reset every open connection; how many there were."""
        return self._each(Connection.reset)

    def half_open(self) -> int:
        """The far side of every open connection vanishes without a word; new connections are good."""
        return self._each(Connection.lose_far_side)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.heal()
        self._in_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join(_PATIENCE_S)

    def time_on_line(self, size: int) -> float:
        """Seconds until the line that all connections share has carried so many bytes more."""
        if not self.faults.line_bytes_per_s:
            return 0.0
        now_s = time.monotonic()
        self._line_free_s = max(now_s, self._line_free_s) + size / self.faults.line_bytes_per_s
        return self._line_free_s - now_s

    def _each(self, act: "Callable[[Connection], None]") -> int:
        async def all_of_them() -> int:
            connections = list(self.connections)
            for connection in connections:
                act(connection)
            return len(connections)

        return int(self._in_loop(all_of_them()))

    def _in_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_PATIENCE_S)

    async def _listen(self) -> None:
        if self.upstream.startswith("unix:"):
            path = Path(self.upstream.removeprefix("unix:").removeprefix("//")).with_suffix(".proxy")
            self._server = await asyncio.start_unix_server(self._accept, path)
            self.address = f"{self.upstream.partition('/')[0]}{'//' * ('//' in self.upstream)}{path}"
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted_s.append(time.monotonic())
        near = Side(reader, writer)
        if self.faults.refuse:
            near.reset()
            return
        try:
            far = Side(*await self._dial())
        except OSError:
            near.reset()
            return
        connection = Connection(self, near, far)
        self.connections.add(connection)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await connection.carry()
        finally:
            self._tasks.discard(task)
            self.connections.discard(connection)

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.upstream.startswith("unix:"):
            return await asyncio.open_unix_connection(self.upstream.removeprefix("unix:").removeprefix("//"))
        host, _, port = self.upstream.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self.connections):
            connection.reset()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_PATIENCE_S / 2)


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def reset(self) -> None:
        """Close so that the peer sees a reset (on a unix socket: an end)."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with suppress(OSError):  # it may be closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
        self.writer.transport.abort()


class Connection:
    """Two sides and what passes between them."""

    def __init__(self, proxy: Proxy, near: Side, far: Side) -> None:
        self._proxy, self._near, self._far = proxy, near, far
        self._replies = Replies(http2=proxy.http2)
        self._is_half = False
        self._over = asyncio.Event()

    async def carry(self) -> None:
        ways = [
            asyncio.create_task(self._way(self._near, self._far, up=True)),
            asyncio.create_task(self._way(self._far, self._near, up=False)),
            asyncio.create_task(self._over.wait()),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._near.writer.transport.abort()
            self._far.writer.transport.abort()

    def reset(self) -> None:
        self._near.reset()
        self._far.reset()
        self._over.set()

    def lose_far_side(self) -> None:
        self._is_half = True
        self._far.reset()

    async def _way(self, source: Side, target: Side, *, up: bool) -> None:
        """Read at once, deliver when it is due: a delay holds back no later piece longer than its own."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_BUFFERED_PIECES)
        delivery = asyncio.create_task(self._deliver(pieces, target, up=up))
        try:
            with suppress(ConnectionError):  # a reset by a peer ends the connection like a close
                while data := await source.reader.read(_PIECE_BYTES):
                    if self._is_half:
                        continue
                    if not up and self._loses(data):
                        self.reset()
                        return
                    faults = self._proxy.faults
                    late = faults.delay_s + faults.jitter_s * self._proxy.random.uniform(-1, 1)
                    await pieces.put((time.monotonic() + late, data))
            if self._is_half and not up:
                await self._over.wait()
            await pieces.join()
        finally:
            delivery.cancel()

    def _loses(self, data: bytes) -> bool:
        proxy = self._proxy
        goodbyes, begun = self._replies.goodbyes, self._replies.begun(data)
        proxy.goodbyes += self._replies.goodbyes - goodbyes
        proxy.replies += begun
        lost = sum(proxy.random.random() < proxy.faults.lose_replies for _ in range(begun))
        proxy.lost_replies += lost
        return lost > 0

    async def _deliver(self, pieces: "asyncio.Queue[tuple[float, bytes]]", target: Side, *, up: bool) -> None:
        proxy = self._proxy
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await proxy.passable.wait()
            if proxy.faults.bytes_per_s:
                await asyncio.sleep(len(data) / proxy.faults.bytes_per_s)
            if not up:
                await asyncio.sleep(proxy.time_on_line(len(data)))
            if proxy.random.random() < proxy.faults.reset:
                proxy.resets += 1
                self.reset()
                return
            with suppress(ConnectionError):  # the peer has gone; its own way ends the connection
                target.writer.write(data)
                await target.writer.drain()
            proxy.bytes_forwarded += len(data)
            pieces.task_done()
