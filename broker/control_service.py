"""ControlService: what operators see of a run and want of it.

Writes only the desired state; learner and actors follow it at their next look. While Redis does not
answer, calls end as UNAVAILABLE: an operator should know.
"""

from typing import Any, Final

from broker.boundary import Malformed
from broker.state import ControlAction, SessionRow, Status
from broker.store import Store
from penstock.v1 import control_pb2 as pb
from penstock.v1 import weights_pb2
from penstock.v1.control_pb2_grpc import ControlServiceServicer
from penstock.wire.limits import KIB

MAX_REASON_LENGTH: Final = KIB

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


class ControlService(ControlServiceServicer):
    """See the module."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def Status(  # noqa: N802 - the name of the RPC
        self, request: pb.StatusRequest, context: Context
    ) -> pb.StatusReply:
        """See control.proto."""
        return status_to_proto(await self._store.status())

    async def Pause(  # noqa: N802 - the name of the RPC
        self, request: pb.ControlRequest, context: Context
    ) -> pb.ControlReply:
        """See control.proto."""
        return await self._control("pause", request)

    async def Resume(  # noqa: N802 - the name of the RPC
        self, request: pb.ControlRequest, context: Context
    ) -> pb.ControlReply:
        """See control.proto."""
        return await self._control("resume", request)

    async def Stop(  # noqa: N802 - the name of the RPC
        self, request: pb.ControlRequest, context: Context
    ) -> pb.ControlReply:
        """See control.proto."""
        return await self._control("stop", request)

    async def Checkpoint(  # noqa: N802 - the name of the RPC
        self, request: pb.ControlRequest, context: Context
    ) -> pb.ControlReply:
        """See control.proto."""
        return await self._control("checkpoint", request)

    async def _control(self, action: ControlAction, request: pb.ControlRequest) -> pb.ControlReply:
        if len(request.reason) > MAX_REASON_LENGTH:
            raise Malformed(f"reason: {len(request.reason)} characters, at most {MAX_REASON_LENGTH}")
        revision, desired = await self._store.control(action, request.reason)
        return pb.ControlReply(revision=revision, desired=weights_pb2.RunState.ValueType(desired.value))


def status_to_proto(status: Status) -> pb.StatusReply:
    """The message of a status."""
    return pb.StatusReply(
        run=status.run,
        desired=weights_pb2.RunState.ValueType(status.desired.value),
        revision=status.revision,
        latest=status.latest.to_proto(),
        log_head=status.log_head,
        log_entries=status.gauges.log_entries,
        log_bytes=status.gauges.log_bytes,
        settled=status.settled,
        outstanding_steps=status.gauges.outstanding_steps,
        budget_steps=status.budget_steps,
        acked=status.acked,
        epoch=status.epoch,
        sessions=[_session_to_proto(row) for row in status.sessions],
        learner_json=status.learner_json,
        closed=status.closed,
    )


def _session_to_proto(row: SessionRow) -> pb.SessionStatus:
    return pb.SessionStatus(
        session=row.session,
        actor_id=row.actor_id,
        role=row.role.label,
        sequence=row.sequence,
        begin_through=row.begin_through,
        applied_version=row.applied_version,
        idle_ms=row.idle_ms,
    )
