"""Serves an application over HTTP or HTTPS in its own thread, on a socket that is bound when it is made.

A connection is closed if the head of a request is not complete within `HEAD_S`. Beyond `MAX_CONNECTIONS` the
envelope refuses requests. One address may have `MAX_OF_ADDRESS` connections, unless it is a trusted proxy.
The envelope limits bodies.
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
from penstock.rpc.address import AddressInUse, check_address, counted_as, is_local
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.health import Health, announce, leave_out_what_stays
from penstock.runtime.lifecycle import Lifecycle

HEAD_S: Final = 10.0
KEEP_ALIVE_S: Final = 30
MAX_HEAD_BYTES: Final = 32 * KIB
MAX_CONNECTIONS: Final = 4096
MAX_OF_ADDRESS: Final = MAX_CONNECTIONS // 2
"""Connections of one address, so that none can take all of them."""
DRAIN_S: Final = 5

log = logging.getLogger(__name__)


class Connections:
    """Counts the open connections of each address. proxies: addresses and networks without a limit."""

    def __init__(self, proxies: Collection[str], most: int) -> None:
        self._proxies = [ip_network(one) for one in proxies]
        self._most = most
        self._open = Counter[str]()

    def begin(self, address: str) -> bool:
        """Count a new connection; returns False beyond the limit."""
        own = counted_as(address)
        self._open[own] += 1
        return self._open[own] <= self._most or any(ip_address(address) in one for one in self._proxies)

    def end(self, address: str) -> None:
        own = counted_as(address)
        self._open[own] -= 1
        if not self._open[own]:
            del self._open[own]


class PatientOnce(H11Protocol):
    """A connection that is closed if the head of a request takes longer than `head_s` seconds.

    connections_of: count of connections by address, shared by the connections of a server.
    """

    head_s: float
    connections_of: Connections
    _address = ""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head, or close the connection where its address has too many."""
        super().connection_made(transport)
        self._address = transport.get_extra_info("peername")[0]
        if self.connections_of.begin(self._address):
            self._await_head()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Limit the time from the first byte of a head until the head is complete."""
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
    """A server whose requests learn of its shutdown, and whether it is full (`frame.event_stream`).

    most: connections at which it is full. The limit of uvicorn would answer in plain text, without metrics.
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

    proxies: addresses and networks whose `X-Forwarded-For` is trusted. option: prefix of the address in
    errors.

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
            proxy_headers=bool(proxies),  # the default trusts every process of this machine
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
        """Whether it ended without `end` or `stop`."""

    def start(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Start to serve; `on_end` is called in the thread of the server when it ends, for any reason."""
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
    # Connections inherit it. Without it the body of an answer, which is written after the head, waits 40 ms
    # for the acknowledgement of the head; asyncio sets it only on sockets that it makes.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
