"""ControlService: what operators see of a run and want of it.

Writes only the desired state and commands; learner and actors follow them at their next look. Versions and
traffic are changed in the registry, which learner and policy servers follow. While Redis, or the registry,
does not answer, calls end as UNAVAILABLE: an operator should know.
"""

import logging
from typing import Any, Final

from penstock.broker.log.replies import Command, CommandAction, ControlAction, SessionRow, Status
from penstock.broker.log.store import Store
from penstock.broker.service.admission import caller_name
from penstock.broker.service.weight_service import (
    Versions,
    traffic_from_proto,
    traffic_to_proto,
    version_to_proto,
)
from penstock.protocol.limits import KIB, MAX_NUMBER, check_id, check_policy
from penstock.registry.records import Status as VersionStatus
from penstock.rpc.boundary import Malformed
from penstock.v1 import control_pb2 as pb
from penstock.v1 import weights_pb2
from penstock.v1.control_pb2_grpc import ControlServiceServicer

# ---- A command of an operator as the message that its caller gets.


def command_to_proto(command: Command) -> pb.Command:
    """The message of a command."""
    answer = command.answer
    message = pb.Command(
        number=command.number,
        request_id=command.request_id,
        action=command.action,
        state=pb.COMMAND_STATE_PENDING,
    )
    if answer is not None:
        message.state = pb.COMMAND_STATE_REFUSED if answer.refusal else pb.COMMAND_STATE_DONE
        message.refusal = pb.CommandRefusal.ValueType(answer.refusal)
        message.detail, message.checkpoint_id = answer.detail, answer.checkpoint_id
        message.version, message.steps = answer.version, answer.steps
    return message


log = logging.getLogger(__name__)
MAX_REASON_LENGTH: Final = KIB
MAX_LISTED: Final = 256
"""Versions in one answer where the caller does not say how many."""

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


class ControlService(ControlServiceServicer):
    """Serves ControlService: what operators see of a run and want of it."""

    def __init__(self, store: Store, versions: Versions) -> None:
        self._store, self._versions = store, versions

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
        if request.request_id:
            name = _name(request.name) if request.name else ""
            command = await self._command("checkpoint", name, request.request_id, request.reason)
            status = await self._store.status()
            desired = weights_pb2.RunState.ValueType(status.desired.value)
            return pb.ControlReply(revision=status.revision, desired=desired, command=command)
        if request.name:
            raise Malformed("request_id: empty; a named checkpoint is a command, draw an id for it")
        return await self._control("checkpoint", request)

    async def Flush(  # noqa: N802 - the name of the RPC
        self, request: pb.FlushRequest, context: Context
    ) -> pb.FlushReply:
        """See control.proto."""
        if request.min_steps > MAX_NUMBER:
            raise Malformed(f"min_steps={request.min_steps}: more than any batch; at most 2^53")
        least = str(max(1, request.min_steps))
        return pb.FlushReply(command=await self._command("flush", least, request.request_id, request.reason))

    async def Restore(  # noqa: N802 - the name of the RPC
        self, request: pb.RestoreRequest, context: Context
    ) -> pb.RestoreReply:
        """See control.proto."""
        name = _name(request.name)
        return pb.RestoreReply(
            command=await self._command("restore", name, request.request_id, request.reason)
        )

    async def ListVersions(  # noqa: N802 - the name of the RPC
        self, request: pb.ListVersionsRequest, context: Context
    ) -> pb.ListVersionsReply:
        """See control.proto."""
        policy, limit = self._policy(request.policy), min(request.limit or MAX_LISTED, MAX_LISTED)
        versions, traffic = await self._versions.ask(
            context, lambda registry: (registry.list(policy)[-limit:], registry.traffic(policy))
        )
        return pb.ListVersionsReply(
            versions=map(version_to_proto, versions), traffic=traffic_to_proto(traffic)
        )

    async def Promote(  # noqa: N802 - the name of the RPC
        self, request: pb.PromoteRequest, context: Context
    ) -> pb.PromoteReply:
        """See control.proto."""
        policy, by, to = self._policy(request.policy), _operator(), _promotion(request.to)
        version, reason = _version(request.version), _reason(request.reason)
        share = request.canary_share if request.HasField("canary_share") else None
        promoted = await self._versions.ask(
            context,
            lambda registry: registry.promote(policy, version, reason, by=by, to=to, canary_share=share),
        )
        return pb.PromoteReply(version=version_to_proto(promoted))

    async def Rollback(  # noqa: N802 - the name of the RPC
        self, request: pb.RollbackRequest, context: Context
    ) -> pb.RollbackReply:
        """See control.proto."""
        policy, by = self._policy(request.policy), _operator()
        version, reason = _version(request.version), _reason(request.reason)
        done = await self._versions.ask(
            context, lambda registry: registry.rollback(policy, reason, by=by, version=version or None)
        )
        return pb.RollbackReply(
            withdrawn=version_to_proto(done.withdrawn),
            active=None if done.active is None else version_to_proto(done.active),
        )

    async def SetTraffic(  # noqa: N802 - the name of the RPC
        self, request: pb.SetTrafficRequest, context: Context
    ) -> pb.SetTrafficReply:
        """See control.proto."""
        wanted, by = traffic_from_proto(request.traffic, self._versions.policy), _operator()
        reason = _reason(request.reason)
        traffic = await self._versions.ask(
            context, lambda registry: registry.set_traffic(wanted, reason, by=by)
        )
        return pb.SetTrafficReply(traffic=traffic_to_proto(traffic))

    def _policy(self, name: str) -> str:
        try:
            return check_policy("policy", name or self._versions.policy)
        except ValueError as error:
            raise Malformed(str(error)) from error

    async def _command(
        self, action: CommandAction, argument: str, request_id: str, reason: str
    ) -> pb.Command:
        _check_reason(reason)
        try:
            check_id("request_id", request_id)
        except ValueError as error:
            raise Malformed(str(error)) from error
        command, is_new = await self._store.command(action, argument, request_id, reason)
        if is_new:
            said = {"command": action, "argument": argument, "by": _operator(), "reason": reason}
            log.info("command of an operator", extra=said | {"number": command.number})
        return command_to_proto(command)

    async def _control(self, action: ControlAction, request: pb.ControlRequest) -> pb.ControlReply:
        _check_reason(request.reason)
        revision, desired = await self._store.control(action, request.reason)
        said = {"command": action, "by": _operator(), "reason": request.reason, "revision": revision}
        log.info("command of an operator", extra=said)
        return pb.ControlReply(revision=revision, desired=weights_pb2.RunState.ValueType(desired.value))


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON_LENGTH:
        raise Malformed(f"reason: {len(reason)} characters, at most {MAX_REASON_LENGTH}")


def _name(name: str) -> str:
    """Return the name of a checkpoint, which becomes the name of a folder and so is no path."""
    try:
        return check_id("name", name)
    except ValueError as error:
        raise Malformed(str(error)) from error


def _operator() -> str:
    """Whom the audit names."""
    return caller_name() or "operator"


def _version(number: int) -> int:
    if number > MAX_NUMBER:
        raise Malformed(f"version={number}: no version has that number; at most 2^53")
    return number


def _reason(text: str) -> str:
    if "\0" in text:
        raise Malformed("reason: holds a NUL, which no audit can keep")
    return text


def _promotion(name: str) -> VersionStatus:
    if name not in ("", "active", "canary"):
        raise Malformed(f"to={name[:80]!r}: a version is promoted to 'canary' or 'active'")
    return VersionStatus(name or "active")


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
