"""Serves the application over HTTP or HTTPS, in a thread of its own, on a socket that is bound before.

A connection whose request head does not come whole within `HEAD_S` is closed. There are at most
`MAX_CONNECTIONS`, beyond which the envelope refuses requests, and `MAX_OF_ADDRESS` of one address, unless it
is that of a proxy which was named. What a body may be is the envelope's.
"""

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.event_stream import ENDING, FULL
from penstock.protocol.limits import KIB
from penstock.rpc.address import AddressInUse, check_address, is_local
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.health import Health, announce, leave_out_what_stays
from penstock.runtime.lifecycle import Lifecycle

HEAD_S: Final = 10.0
KEEP_ALIVE_S: Final = 30
MAX_HEAD_BYTES: Final = 32 * KIB
MAX_CONNECTIONS: Final = 4096
MAX_OF_ADDRESS: Final = MAX_CONNECTIONS // 2
"""Connections of one address: one that holds more than it uses keeps out nobody else."""
DRAIN_S: Final = 5

log = logging.getLogger(__name__)


class Connections:
    """Counts the open connections of each address. proxies: addresses and networks that have no bound."""

    def __init__(self, proxies: Collection[str], most: int) -> None:
        self._proxies = [ip_network(one) for one in proxies]
        self._most = most
        self._open = Counter[str]()

    def begin(self, address: str) -> bool:
        """Count one more; False: it is one too many."""
        self._open[address] += 1
        return self._open[address] <= self._most or any(ip_address(address) in one for one in self._proxies)

    def end(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class PatientOnce(H11Protocol):
    """A connection that waits `head_s` for the head of a request, and then closes.

    connections_of: addresses, at its server.
    """

    head_s: float
    connections_of: Connections
    _address = ""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head, or close where its address has too many."""
        super().connection_made(transport)
        self._address = transport.get_extra_info("peername")[0]
        if self.connections_of.begin(self._address):
            self._await_head()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, from the first byte of a head on, until it is whole."""
        cycle: Any = self.cycle
        idle = cycle is None or cycle.response_complete
        if idle and self._head_timer is None:
            self._await_head()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.connections_of.end(self._address)
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class EndingServer(uvicorn.Server):
    """A server whose requests learn that it has begun to end, or is full, by `frame.event_stream`.

    most: connections at which it is full. Uvicorn's own bound would answer in plain text, uncounted.
    """

    def __init__(self, config: uvicorn.Config, most: int = MAX_CONNECTIONS) -> None:
        super().__init__(config)
        self._most = most

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state[ENDING] = asyncio.Event()
        self.lifespan.state[FULL] = lambda: len(self.server_state.connections) >= self._most
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state[ENDING].set()
        await super().shutdown(sockets)


class HttpServer:
    """The server of an application.

    proxies: addresses and networks whose word is taken (`X-Forwarded-For`) for whom a request is from.

    option: what stands before the address in errors.

    Raises ConfigurationError for an address that is no HOST:PORT, or beyond loopback without a certificate
    and without `insecure`; AddressInUse for one that is taken.
    """

    def __init__(
        self,
        app: FastAPI,
        listen: str,
        *,
        certificate: Path | None = None,
        key: Path | None = None,
        insecure: bool = False,
        proxies: Collection[str] = (),
        head_s: float = HEAD_S,
        most_of_address: int = MAX_OF_ADDRESS,
        most_connections: int = MAX_CONNECTIONS,
        log_level: str | None = None,
        option: str = "--listen ",
    ) -> None:
        check_listen(listen, encrypted=certificate is not None, insecure=insecure, option=option)
        self._socket = _bind(listen, option)
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if certificate is None else "https"
        self.address = f"{f'[{host}]' if ':' in host else host}:{port}"
        self.url = f"{scheme}://{self.address}"
        own = {"head_s": head_s, "connections_of": Connections(proxies, most_of_address)}
        kind: Any = type("Connection", (PatientOnce,), own)
        config = uvicorn.Config(
            app,
            http=kind,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=log_level,
            access_log=False,  # it would write queries, and with them what presigned links carry
            server_header=False,
            proxy_headers=bool(proxies),  # by itself it takes the word of whoever connects from this machine
            forwarded_allow_ips=list(proxies),
            ssl_certfile=certificate,
            ssl_keyfile=key,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._server = EndingServer(config, most_connections)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._on_end: Callable[[], None] = lambda: None
        self.failed = False
        """Whether it has ended without having been asked to."""

    def start(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Begin to serve; `on_end` is called from the server's thread when it ends, for whatever reason."""
        self._on_end = on_end
        self._thread.start()

    async def serve_in_loop(self) -> None:
        """Serve in this event loop, instead of in a thread, until `end` was called."""
        await self._server.serve(sockets=[self._socket])

    def end(self) -> None:
        """Have `serve_in_loop` finish the requests that are open, for `DRAIN_S` seconds, and end."""
        self._server.should_exit = True

    def stop(self) -> None:
        """Take no new request, finish those that are open, for `DRAIN_S` seconds, and end."""
        self.end()
        self._thread.join(2 * DRAIN_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("the HTTP server has ended")
        finally:
            self.failed = not self._server.should_exit
            self._on_end()


def serve(
    servers: Mapping[HttpServer, str],
    lifecycle: Lifecycle,
    health: Health,
    role: str,
    metrics_port: int,
) -> int:
    """Serve until the lifecycle drains; returns the exit code. servers: each with the path of its page."""
    for one in servers:
        one.start(on_end=lambda: lifecycle.drain("the HTTP server has ended"))
    leave_out_what_stays()
    health.set_ready(True)
    announce(role, metrics_port=metrics_port, address=next(iter(servers)).address)
    for one, page in servers.items():
        log.info("serving", extra={"url": f"{one.url}{page}"})
    lifecycle.draining.wait()
    health.set_ready(False, "draining")
    for one in servers:
        one.end()
    for one in servers:
        one.stop()
    return EXIT_FAILED if any(one.failed for one in servers) else EXIT_OK


def check_listen(listen: str, *, encrypted: bool, insecure: bool, option: str = "--listen ") -> None:
    """Raise ConfigurationError for an address that is no HOST:PORT, or beyond loopback in plaintext."""
    try:
        check_address(listen)
    except ValueError as error:
        raise ConfigurationError(f"{option}{listen}: write HOST:PORT") from error
    if listen.startswith("unix:"):
        raise ConfigurationError(f"{option}{listen}: write HOST:PORT")
    if not is_local(listen) and not encrypted and not insecure:
        raise ConfigurationError(
            f"{option}{listen}: passwords and tokens would travel in plaintext; set "
            "security.tls_certificate and security.tls_key, or say --insecure where a proxy in front speaks "
            "TLS"
        )


def _bind(listen: str, option: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, int(port)), family=family, backlog=512)
    except OSError as error:
        raise AddressInUse(f"{option}{listen}: {error.strerror}; choose another port, or 0") from error
    # Connections have it from here. Without it the body of an answer, which is written behind its head, waits
    # until the client has acknowledged the head, 40 ms; asyncio sets it on sockets of its own making alone.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
