"""gRPC servers, all with the same options, the standard health service and reflection.

A server owns its address alone: `grpc.so_reuseport` is off, so a port in use is an error and not
a silent second listener.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.rpc.address import AddressInUse, check_address
from penstock.rpc.auth import Credentials

# ---- The standard health service (grpc.health.v1), for callers that may be slow or hostile.

Status = pb.HealthCheckResponse.ServingStatus
Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """What checks of each service answer; "" is the server as a whole."""

    def __init__(self) -> None:
        self._status: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def set(self, service: str, status: int) -> None:
        """Answer `status` for `service` from now on; watchers that read are told."""
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
    # Above the limit: who sends a little too much is told so by name, not by a transport error.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + MIB),
    ("grpc.max_metadata_size", 16 * 1024),
    # None but "identity": what comes compressed is refused before anything unfolds it. Tensors have codecs of
    # their own.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
STREAMS_PER_CONNECTION: Final = 64
"""One connection cannot fill a server: what it calls beyond this waits on its own side."""
CONNECTION_GRACE_S: Final = 60.0
"""What a connection that has reached its age is given for the calls on it; the longest is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A server with its health service."""

    server: grpc.aio.Server
    health: HealthServicer
    service_names: tuple[str, ...]

    async def set_serving(self, *, serving: bool) -> None:
        """Answer health checks SERVING or NOT_SERVING, for the server and each service."""
        value = Status.SERVING if serving else Status.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, value)


class _NotOurs(logging.Filter):
    """Drops the records of peers that go away with their reply unread: no error of the server."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "ExecuteBatchError" not in record.getMessage()


logging.getLogger("grpc._cython.cygrpc").addFilter(_NotOurs())


def build_server(
    service_names: Sequence[str],
    *,
    interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = (),
    maximum_concurrent_rpcs: int | None = None,
    max_connections: int | None = None,
    max_connection_age_s: float | None = None,
    streams_per_connection: int = STREAMS_PER_CONNECTION,
) -> Front:
    """Return a server without services or address yet. service_names: full names, for reflection.

    A connection of that age is asked to come again: clients find new brokers, and certificates that have
    run out lose their hold. Connections beyond `max_connections` are closed at once. As many calls as
    may be in hand may also wait to be looked at.
    """
    server = grpc.aio.server(
        interceptors=list(interceptors),
        options=(
            *SERVER_OPTIONS,
            ("grpc.max_concurrent_streams", streams_per_connection),
            *_pending_options(maximum_concurrent_rpcs),
            *_connection_options(max_connections, max_connection_age_s),
        ),
        maximum_concurrent_rpcs=maximum_concurrent_rpcs,
        compression=grpc.Compression.NoCompression,
    )
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return Front(server=server, health=servicer, service_names=tuple(service_names))


def _pending_options(most: int | None) -> list[tuple[str, int]]:
    """Without these gRPC ends some of more than 1,000 waiting calls, and all beyond 3,000, as CANCELLED."""
    if most is None:
        return []
    return [("grpc.server.max_pending_requests", most), ("grpc.server.max_pending_requests_hard_limit", most)]


def _connection_options(most: int | None, age_s: float | None) -> list[tuple[str, int]]:
    options = [] if most is None else [("grpc.max_allowed_incoming_connections", most)]
    if age_s is not None:
        options += [
            ("grpc.max_connection_age_ms", round(age_s * 1000)),
            ("grpc.max_connection_age_grace_ms", round(CONNECTION_GRACE_S * 1000)),
        ]
    return options


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
    """A unix socket that another process serves would be replaced by gRPC; ask first."""
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
    """Since gRPC says only "failed to bind": find out why by binding ourselves."""
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
