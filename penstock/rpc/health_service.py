"""The standard health service (grpc.health.v1), for callers that may be slow or hostile.

gRPC's own servicer writes to a watcher while it holds the lock that `set` waits for: one that reads nothing
would keep a server from ever saying that it drains. Here a drain waits for no watcher.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

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
        """See health.proto of grpc.health.v1."""
        status = self._status.get(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service={request.service[:80]!r}: not served here"
            )
        return pb.HealthCheckResponse(status=status)

    async def List(  # noqa: N802 - the name of the RPC
        self, request: pb.HealthListRequest, context: Context
    ) -> pb.HealthListResponse:
        """See health.proto of grpc.health.v1."""
        statuses = {name: pb.HealthCheckResponse(status=status) for name, status in self._status.items()}
        return pb.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802 - the name of the RPC
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        """See health.proto of grpc.health.v1."""
        sent = None
        while True:
            changed = self._changed
            status = self._status.get(request.service, Status.SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield pb.HealthCheckResponse(status=status)
            await changed.wait()
