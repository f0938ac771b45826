"""ControlService: what operators see of a run and want of it.

Writes only the desired state and commands; learner and actors follow them at their next look. Versions and
traffic are changed in the registry, which learner and policy servers follow. While Redis, or the registry,
does not answer, calls end as UNAVAILABLE: an operator should know.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from penstock.broker.log.replies import Command, CommandAction, ControlAction, Status
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
from penstock.rpc.gate import Context, Malformed
from penstock.v1 import control_pb2 as pb
from penstock.v1 import weights_pb2
from penstock.v1.control_pb2_grpc import ControlServiceServicer

# ---- A command of an operator as the message that its caller gets.


def command_to_proto(command: Command) -> pb.Command:
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


class ControlService(ControlServiceServicer):
    """Serves ControlService: what operators see of a run and want of it."""

    def __init__(self, store: Store, versions: Versions) -> None:
        self._store, self._versions = store, versions

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        return status_to_proto(await self._store.status())

    async def Pause(self, request: pb.ControlRequest, context: Context) -> pb.ControlReply:
        return await self._control("pause", request)

    async def Resume(self, request: pb.ControlRequest, context: Context) -> pb.ControlReply:
        return await self._control("resume", request)

    async def Stop(self, request: pb.ControlRequest, context: Context) -> pb.ControlReply:
        return await self._control("stop", request)

    async def Checkpoint(self, request: pb.ControlRequest, context: Context) -> pb.ControlReply:
        if request.request_id:
            name = _name(request.name) if request.name else ""
            command = await self._command("checkpoint", name, request.request_id, request.reason)
            status = await self._store.status()
            desired = weights_pb2.RunState.ValueType(status.desired.value)
            return pb.ControlReply(revision=status.revision, desired=desired, command=command)
        if request.name:
            raise Malformed("request_id: empty; a named checkpoint is a command, draw an id for it")
        return await self._control("checkpoint", request)

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushReply:
        if request.min_steps > MAX_NUMBER:
            raise Malformed(f"min_steps={request.min_steps}: more than any batch; at most 2^53")
        least = str(max(1, request.min_steps))
        return pb.FlushReply(command=await self._command("flush", least, request.request_id, request.reason))

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreReply:
        name = _name(request.name)
        return pb.RestoreReply(
            command=await self._command("restore", name, request.request_id, request.reason)
        )

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsReply:
        policy, limit = self._policy(request.policy), min(request.limit or MAX_LISTED, MAX_LISTED)
        versions, traffic = await self._versions.ask(
            context, lambda registry: (registry.list(policy)[-limit:], registry.traffic(policy))
        )
        return pb.ListVersionsReply(
            versions=map(version_to_proto, versions), traffic=traffic_to_proto(traffic)
        )

    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PromoteReply:
        policy, by, to = self._policy(request.policy), _operator(), _promotion(request.to)
        version, reason = _version(request.version), _reason(request.reason)
        share = request.canary_share if request.HasField("canary_share") else None
        promoted = await self._versions.ask(
            context,
            lambda registry: registry.promote(policy, version, reason, by=by, to=to, canary_share=share),
        )
        return pb.PromoteReply(version=version_to_proto(promoted))

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.RollbackReply:
        policy, by = self._policy(request.policy), _operator()
        version, reason = _version(request.version), _reason(request.reason)
        done = await self._versions.ask(
            context, lambda registry: registry.rollback(policy, reason, by=by, version=version or None)
        )
        return pb.RollbackReply(
            withdrawn=version_to_proto(done.withdrawn),
            active=None if done.active is None else version_to_proto(done.active),
        )

    async def SetTraffic(self, request: pb.SetTrafficRequest, context: Context) -> pb.SetTrafficReply:
        wanted, by = traffic_from_proto(request.traffic, self._versions.policy), _operator()
        reason = _reason(request.reason)
        traffic = await self._versions.ask(
            context, lambda registry: registry.set_traffic(wanted, reason, by=by)
        )
        return pb.SetTrafficReply(traffic=traffic_to_proto(traffic))

    def _policy(self, name: str) -> str:
        return _checked(check_policy, "policy", name or self._versions.policy)

    async def _command(
        self, action: CommandAction, argument: str, request_id: str, reason: str
    ) -> pb.Command:
        _check_reason(reason)
        _checked(check_id, "request_id", request_id)
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


def _checked(check: Callable[[str, str], str], field: str, value: str) -> str:
    try:
        return check(field, value)
    except ValueError as error:
        raise Malformed(str(error)) from error


def _name(name: str) -> str:
    """Return the name of a checkpoint, which becomes the name of a folder and so is no path."""
    return _checked(check_id, "name", name)


def _operator() -> str:
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
    same = (
        "run revision log_head settled budget_steps acked epoch learner_json closed log_entries log_bytes "
        "outstanding_steps"
    )
    return pb.StatusReply(
        **{name: getattr(status, name) for name in same.split()},
        desired=weights_pb2.RunState.ValueType(status.desired.value),
        latest=status.latest.to_proto(),
        sessions=[pb.SessionStatus(**asdict(row) | {"role": row.role.label}) for row in status.sessions],
    )
