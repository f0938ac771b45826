"""ControlService: how operators watch a run and steer it.

Writes only the desired state and commands; learner and actors follow them at their next look. Versions and
traffic are changed in the registry, which learner and policy servers follow. While Redis, or the registry,
does not answer, calls end as UNAVAILABLE, so that an operator sees it.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from penstock.broker.log.replies import Command, CommandAction, ControlAction, Status
from penstock.broker.log.store import Store
from penstock.broker.service.sessions import caller_name
from penstock.config.configuration_error import how_to_install
from penstock.protocol.limits import KIB, MAX_NUMBER, check_id, check_policy
from penstock.registry.records import PolicyVersion, RegistryError, Traffic, Unavailable, UnknownVersion
from penstock.registry.records import Status as VersionStatus
from penstock.rpc.gate import Absent, Context, Malformed
from penstock.v1 import control_pb2 as pb
from penstock.v1 import weights_pb2
from penstock.v1.control_pb2_grpc import ControlServiceServicer

if TYPE_CHECKING:
    from penstock.registry.registry import Registry

log = logging.getLogger(__name__)
T = TypeVar("T")

# ---- Versions and traffic for operators: the registry behind ControlService, in threads.

_THREADS: Final = 4


class Versions:
    """The registry at `url`; "": none. policy: the one that a call means that names none."""

    def __init__(self, url: str, policy: str) -> None:
        self.policy = policy
        self._url = url
        self._registry: Registry | None = None
        self._opening = Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="registry")

    async def ask(self, context: Context, work: "Callable[[Registry], T]") -> T:
        """Return what `work` returns; ends the call, or raises Malformed or Absent, where that fails."""
        if not self._url:
            text = (
                "this broker was given no registry: set registry.url to its URL, "
                "or use `penstock policy` where the run's folder lies"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        code, text = grpc.StatusCode.FAILED_PRECONDITION, ""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: work(self._opened())
            )
        except UnknownVersion as error:
            raise Absent(str(error)) from error
        except Unavailable as error:
            code, text = grpc.StatusCode.UNAVAILABLE, str(error)
        except RegistryError as error:
            text = str(error)
        except ImportError as error:
            text = f"{error}; on the machine of this broker: {how_to_install('registry')}"
        except ValueError as error:
            raise Malformed(str(error)) from error
        await context.abort(code, text)
        raise AssertionError  # abort has raised

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._registry is not None:
            self._registry.close()

    def _opened(self) -> "Registry":
        from penstock.registry.registry import Registry  # noqa: PLC0415 - a broker without one needs no SQLAlchemy

        with self._opening:
            if self._registry is None:
                self._registry = Registry.open(self._url)
            return self._registry


# ---- Versions and traffic as messages.


def version_to_proto(version: PolicyVersion) -> pb.RegisteredVersion:
    evaluation = version.evaluation
    same = "policy version run update sha256 size_bytes configuration standby pinned reason"
    return pb.RegisteredVersion(
        **{name: getattr(version, name) for name in same.split()},
        parent=version.parent or 0,
        evaluation=None if evaluation is None else pb.EvaluationResult(**asdict(evaluation)),
        origin=version.origin.value,
        status=version.status.value,
        created_ms=round(version.created.timestamp() * 1000),
        changed_ms=round(version.changed.timestamp() * 1000),
    )


def traffic_to_proto(traffic: Traffic) -> pb.Traffic:
    return pb.Traffic(
        policy=traffic.policy,
        revision=traffic.revision,
        experiment=traffic.experiment,
        canary_share=traffic.canary_share,
        latest_share=traffic.latest_share,
        shadow=traffic.shadow or 0,
        pins=dict(traffic.pins),
    )


def traffic_from_proto(message: pb.Traffic, policy: str) -> Traffic:
    """Raise Malformed that names the field."""
    try:
        return Traffic(
            policy=message.policy or policy,
            revision=message.revision,
            experiment=message.experiment or "default",
            canary_share=message.canary_share,
            latest_share=message.latest_share,
            shadow=message.shadow or None,
            pins=dict(message.pins),
        )
    except ValueError as error:
        raise Malformed(f"traffic: {error}") from error


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


# ---- The calls.

MAX_REASON_LENGTH: Final = KIB
MAX_LISTED: Final = 256
"""Versions in one answer where the caller does not say how many."""


class ControlService(ControlServiceServicer):
    """Serves ControlService: how operators watch a run and steer it."""

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
            words = {"command": action, "argument": argument, "by": _operator(), "reason": reason}
            log.info("command of an operator", extra=words | {"number": command.number})
        return command_to_proto(command)

    async def _control(self, action: ControlAction, request: pb.ControlRequest) -> pb.ControlReply:
        _check_reason(request.reason)
        revision, desired = await self._store.control(action, request.reason)
        words = {"command": action, "by": _operator(), "reason": request.reason, "revision": revision}
        log.info("command of an operator", extra=words)
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
