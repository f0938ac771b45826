"""Control of a run for an event loop, over the address of its broker."""

import json
from typing import Any, Final, Self

import grpc

from penstock.client.connection import PLAINTEXT
from penstock.client.errors import InvalidRequest, NotAllowed, PolicyError, Unreachable
from penstock.client.values import CommandRefusal, CommandReport, CommandState, RunStatus
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_async_channel
from penstock.rpc.gate import code_of, text_of
from penstock.v1 import control_pb2 as pb
from penstock.v1.control_pb2_grpc import ControlServiceStub

_STATES: Final = {pb.COMMAND_STATE_DONE: CommandState.DONE, pb.COMMAND_STATE_REFUSED: CommandState.REFUSED}
_REFUSALS: Final = {
    pb.COMMAND_REFUSAL_UNSUPPORTED: CommandRefusal.UNSUPPORTED,
    pb.COMMAND_REFUSAL_TOO_FEW_STEPS: CommandRefusal.TOO_FEW_STEPS,
    pb.COMMAND_REFUSAL_NAME: CommandRefusal.NAME,
    pb.COMMAND_REFUSAL_MISMATCH: CommandRefusal.MISMATCH,
    pb.COMMAND_REFUSAL_LIMIT: CommandRefusal.LIMIT,
}
_KINDS: Final[dict[grpc.StatusCode | None, type[PolicyError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
}


class AsyncControlClient:
    """Steers one run; make it where the loop runs. Every call raises a PolicyError where it is not answered.

        control = AsyncControlClient("127.0.0.1:50051")
        report = await control.flush("my-flush-1", min_steps=128)      what is pending becomes a batch
        report = await control.restore("b-1", "before-the-show")        gone back to

    A command with the same request id is the same command: ask again until its state is no longer PENDING.
    Cancelling a task leaves the command asked for.

    deadline_s: of one call, in seconds.
    """

    def __init__(
        self, address: str, *, credentials: Credentials = PLAINTEXT, deadline_s: float = CALL_DEADLINE_S
    ) -> None:
        self._address, self._deadline_s = address, deadline_s
        self._channel = open_async_channel(address, credentials)
        self._stub: Any = ControlServiceStub(self._channel)

    async def status(self) -> RunStatus:
        """Return the run as it is."""
        reply = await self._call("Status", pb.StatusRequest())
        return RunStatus(
            run=reply.run,
            version=reply.latest.version,
            update=reply.latest.update,
            learner=json.loads(reply.learner_json or "{}"),
        )

    async def flush(self, request_id: str, *, min_steps: int = 1, reason: str = "") -> CommandReport:
        """Ask that what is pending be learned from, if it is `min_steps` environment steps or more."""
        request = pb.FlushRequest(request_id=request_id, min_steps=min_steps, reason=reason)
        return _report((await self._call("Flush", request)).command)

    async def checkpoint(self, request_id: str, name: str, *, reason: str = "") -> CommandReport:
        """Ask for a checkpoint that is kept under a name."""
        request = pb.ControlRequest(request_id=request_id, name=name, reason=reason)
        return _report((await self._call("Checkpoint", request)).command)

    async def restore(self, request_id: str, name: str, *, reason: str = "") -> CommandReport:
        """Ask that the learner go back to a named checkpoint."""
        request = pb.RestoreRequest(request_id=request_id, name=name, reason=reason)
        return _report((await self._call("Restore", request)).command)

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=self._deadline_s)
        except grpc.RpcError as error:
            kind = _KINDS.get(code_of(error), Unreachable)
            raise kind(f"the broker at {self._address}: {text_of(error)}") from error


def _report(command: pb.Command) -> CommandReport:
    refused = command.state == pb.COMMAND_STATE_REFUSED
    return CommandReport(
        state=_STATES.get(command.state, CommandState.PENDING),
        refusal=_REFUSALS.get(command.refusal, CommandRefusal.OTHER) if refused else None,
        detail=command.detail,
        version=command.version,
        steps=command.steps,
    )
