"""The gRPC server of a process, from its address to the end of its last call.

    ServerFrame ─► services are added ─► bind ─► begin ─► … ─► drain ─► close
                                                 SERVING      NOT_SERVING, calls in flight end

Broker, policy server and reward service use it. A server does not share its address: `grpc.so_reuseport` is
off, so a port in use is an error. Before a call reaches its handler it passes the gate, which checks
identity, permission, rate and size, parses the request and answers errors.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection

from penstock.config.credentials import credentials
from penstock.config.settings import BrokerSection, ConfigurationError, Settings
from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.rpc.address import AddressInUse, check_address
from penstock.rpc.auth import NO_CALLS, AcceptedTokens, Calls, Credentials, Proof
from penstock.rpc.gate import Boundary, Context, Gate, RateLimits, Rates
from penstock.runtime import metrics
from penstock.runtime.health import announce

# ---- The standard health service (grpc.health.v1), robust against slow and hostile callers.

Status = pb.HealthCheckResponse.ServingStatus


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """The status of each service; "" is the server as a whole."""

    def __init__(self) -> None:
        self._status: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def set(self, service: str, status: int) -> None:
        """Set the status of a service, and send it to its watchers."""
        self._status[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(  # noqa: N802 - the name of the RPC
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service={request.service[:80]!r}: not served here"
            )
        return pb.HealthCheckResponse(status=status)

    async def List(  # noqa: N802 - the name of the RPC
        self, request: pb.HealthListRequest, context: Context
    ) -> pb.HealthListResponse:
        statuses = {name: pb.HealthCheckResponse(status=status) for name, status in self._status.items()}
        return pb.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802 - the name of the RPC
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        sent = None
        while True:
            changed = self._changed
            status = self._status.get(request.service, Status.SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield pb.HealthCheckResponse(status=status)
            await changed.wait()


SERVER_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Above the limit: a message slightly too large gets an error of the boundary, not of the transport.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + MIB),
    ("grpc.max_metadata_size", 16 * 1024),
    # "identity" only: compressed messages are refused before they are decompressed. Tensors have other
    # codecs.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
STREAMS_PER_CONNECTION: Final = 64
"""Most concurrent calls of one connection, so that none fills a server; others wait at the client."""
CONNECTION_GRACE_S: Final = 60.0
"""Time for the calls of a connection that has reached its age; longer than the longest call."""


# A peer that disconnects before it has read its reply is not an error of the server.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda one: "ExecuteBatchError" not in one.getMessage())


class Front:
    """A server with its health service, but without other services and an address.

    A connection of `max_connection_age_s` is asked to reconnect: clients then find new brokers, and expired
    certificates are no longer accepted. Connections beyond `max_connections` are closed at once. At most
    `max_concurrent_calls` are being handled, and as many wait.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        section: BrokerSection,
        *,
        interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = (),
        streams_per_connection: int = STREAMS_PER_CONNECTION,
    ) -> None:
        most_calls = section.max_concurrent_calls
        self.server = grpc.aio.server(
            interceptors=list(interceptors),
            options=(
                *SERVER_OPTIONS,
                ("grpc.max_concurrent_streams", streams_per_connection),
                # By default gRPC cancels some of more than 1,000 waiting calls, and all beyond 3,000.
                ("grpc.server.max_pending_requests", most_calls),
                ("grpc.server.max_pending_requests_hard_limit", most_calls),
                ("grpc.max_allowed_incoming_connections", section.max_connections),
                ("grpc.max_connection_age_ms", round(section.max_connection_age_s * 1000)),
                ("grpc.max_connection_age_grace_ms", round(CONNECTION_GRACE_S * 1000)),
            ),
            maximum_concurrent_rpcs=most_calls,
            compression=grpc.Compression.NoCompression,
        )
        self._health, self._names = HealthServicer(), ("", *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def set_serving(self, *, serving: bool) -> None:
        for name in self._names:
            await self._health.set(name, Status.SERVING if serving else Status.NOT_SERVING)


def bind(server: grpc.aio.Server, address: str, credentials: Credentials) -> str:
    """Listen on HOST:PORT (0: a free port) or unix:/path; returns the address clients can use."""
    tls = credentials.for_server(check_address(address))
    _refuse_served_socket(address)
    try:
        port = server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
    except RuntimeError as error:
        raise _bind_error(address, error) from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _refuse_served_socket(address: str) -> None:
    """Raise AddressInUse for a unix socket that another process serves: gRPC would replace it."""
    if not address.startswith("unix:") or not Path(address.removeprefix("unix:")).exists():
        return
    if not Path(address.removeprefix("unix:")).is_socket():
        raise ValueError(f"{address}: is no socket, and is left as it is; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return
    raise AddressInUse(f"{address} is in use; stop the process there or choose another")


def _bind_error(address: str, error: RuntimeError) -> OSError:
    """Find the cause by binding without gRPC, which reports only "failed to bind"."""
    if address.startswith("unix:"):
        folder = Path(address.removeprefix("unix:")).parent
        why = str(error) if folder.is_dir() else f"{folder} is no folder; make it, or choose another path"
        return OSError(f"{address} cannot be bound: {why}")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port))):
            return OSError(f"{address} cannot be bound: {error}")
    except OSError as cause:
        if cause.errno == errno.EADDRINUSE:
            return AddressInUse(f"{address}: port in use; choose another port, or 0")
        return OSError(f"{address} cannot be bound: {cause.strerror}")


class ServerFrame(Front):
    """Runs the gRPC server of a process, see the module. One event loop uses it."""

    def __init__(
        self,
        role: str,
        services: Sequence[str],
        settings: Settings,
        listen: str,
        *,
        boundary: Boundary,
        rates: Rates | None = None,
        streams_per_connection: int = STREAMS_PER_CONNECTION,
        calls: Calls = NO_CALLS,
    ) -> None:
        """Make a server that has no services and no address yet.

        role: under which the process is announced. services: their full names, for health and reflection.
        listen: HOST:PORT (0: a free port) or unix:/path. rates: of each caller; None: those of a broker.
        calls: which party may call which method of a workload's services.
        Raises ConfigurationError for invalid credentials, and for credentials without the name of the run.
        """
        self._role, self._listen = role, listen
        self._credentials = credentials(settings.security)
        self._address = ""
        super().__init__(
            services,
            settings.broker,
            interceptors=[_gate(settings, boundary, self._credentials, listen, rates, calls)],
            streams_per_connection=streams_per_connection,
        )

    def bind(self) -> str:
        try:
            self._address = bind(self.server, self._listen, self._credentials)
        except (ValueError, OSError) as error:
            raise ConfigurationError(str(error)) from error
        return self._address

    async def begin(self, *, metrics_port: int) -> None:
        """Serve calls, answer health checks with SERVING and announce the process."""
        await self.server.start()
        await self.set_serving(serving=True)
        announce(self._role, metrics_port=metrics_port, address=self._address)

    async def drain(self, grace_s: float, release: Callable[[], None] = lambda: None) -> None:
        """Report NOT_SERVING, refuse new calls, end long polls by `release`, others within `grace_s`."""
        await self.set_serving(serving=False)
        release()
        await self.server.stop(grace_s)

    async def close(self) -> None:
        await self.server.stop(0)


def setter(event: asyncio.Event) -> Callable[[], None]:
    loop = asyncio.get_running_loop()

    def set_event() -> None:
        loop.call_soon_threadsafe(event.set)

    return set_event


def _gate(
    settings: Settings, boundary: Boundary, own: Credentials, address: str, rates: Rates | None, calls: Calls
) -> Gate:
    proof = own.proof(address)
    if proof is not Proof.NOTHING and not settings.run:
        raise ConfigurationError(
            "run='': certificates and tokens are a run's; say whose are served: --set run=NAME"
        )
    tokens = None
    if proof is Proof.TOKEN and own.accepted_tokens is not None:
        try:
            tokens = AcceptedTokens(own.accepted_tokens)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"security.accepted_tokens: {error}") from error
    rates = rates or Rates(calls=settings.broker.max_calls_per_s, bytes=settings.broker.max_bytes_per_s)
    return Gate(
        boundary,
        RateLimits(rates),
        proof=proof,
        run=settings.run,
        tokens=tokens,
        on_denied=lambda label: metrics.REFUSALS.labels(reason=label).inc(),
        calls=calls,
    )
