"""The calls behind `penstock control`: one broker, which is called again until the learner has answered."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from penstock.config.credentials import credentials
from penstock.config.service_settings import calling_security
from penstock.config.settings import ConfigurationError
from penstock.launch.inspection.processes import broker_of, is_going_on, read_endpoints
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.protocol.messages import RunState
from penstock.rpc.channel import open_channel
from penstock.runtime.exit import Fatal, NoAnswer
from penstock.v1 import control_pb2 as pb
from penstock.v1.control_pb2_grpc import ControlServiceStub

T = TypeVar("T")

ASK_S: Final = 0.5
"""Seconds between two looks at an answer."""
NOTE_S: Final = 5.0
"""Seconds between two notes on the terminal that there is no answer yet."""
_PASSING: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Broker or Redis is away: the command may be recorded, and repeating it is safe."""

_REQUESTS: Final[dict[str, Callable[..., Any]]] = {
    "Checkpoint": pb.ControlRequest,
    "Restore": pb.RestoreRequest,
    "Flush": pb.FlushRequest,
}
Ask = Callable[[], pb.Command]
"""Calls for a command, also again: a repeated call returns the state of the same command."""


@contextmanager
def opened_for(run: str, config: Path | None, assignments: tuple[str, ...]) -> Iterator["ControlCalls"]:
    """Open the broker of a run, its folder or the broker's address, inside the block.

    config: default: that of the run. Raises ConfigurationError without a broker, Fatal: the run has ended.
    """
    folder = Path(run)
    address = _address(folder) if folder.is_dir() else run
    security = calling_security(folder, config, assignments)
    try:
        channel = open_channel(address, credentials(security))
    except ValueError as error:
        raise ConfigurationError(f"{run}: no folder of a run, and as an address: {error}") from error
    with channel:
        yield ControlCalls(ControlServiceStub(channel), address)


def _address(folder: Path) -> str:
    address = broker_of(read_endpoints(folder))
    if not address:
        raise ConfigurationError(f"{folder}: names no broker; give the address of one, HOST:PORT")
    if not is_going_on(folder):
        raise Fatal(f"{folder}: the run has ended; `penstock train --resume` goes on with it")
    return address


class ControlCalls:
    """Calls of one broker. Raises Fatal where it refuses a call, NoAnswer where it does not answer."""

    def __init__(self, stub: Any, address: str) -> None:
        self._stub, self._address = stub, address

    def wanted(self, call: str, reason: str) -> tuple[str, int]:
        """Make the call Pause, Resume or Stop; return the desired state, and its revision."""
        request = pb.ControlRequest(reason=reason)
        reply = self.called(lambda: getattr(self._stub, call)(request, timeout=CALL_DEADLINE_S))
        return RunState(reply.desired).label, reply.revision

    def command(self, call: str, **fields: Any) -> Ask:
        """Return the call Checkpoint, Restore or Flush. fields: of its request."""
        request = _REQUESTS[call](**fields)
        return lambda: getattr(self._stub, call)(request, timeout=CALL_DEADLINE_S).command

    def await_answer(self, ask: Ask, timeout_s: float) -> pb.Command:
        """Ask until the learner has answered, and return the command; at once where `timeout_s` is 0.

        Raises Fatal where it has not answered within `timeout_s` seconds.
        """
        command = self.called(ask)
        began = noted = time.monotonic()
        pause = threading.Event()
        while command.state == pb.COMMAND_STATE_PENDING and timeout_s:
            now = time.monotonic()
            if now - began > timeout_s:
                raise Fatal(
                    f"{command.action} {command.number}: not answered within {timeout_s:g} s, and still "
                    "pending; is the learner running, or the run paused with a flush that waits? The same "
                    f"command with --request-id {command.request_id} looks again"
                )
            if now - noted > NOTE_S:
                noted = now
                sys.stderr.write(f"waiting for the learner ({now - began:.0f} s)\n")
            pause.wait(ASK_S)
            command = self.called(ask, passing=command)
        return command

    def called(self, call: Callable[[], T], passing: T | None = None) -> T:
        """Return the result of a call, or `passing`, if given, while the broker or Redis is away."""
        try:
            return call()
        except grpc.RpcError as error:
            if passing is not None and error.code() in _PASSING:
                return passing
            match error.code():
                case grpc.StatusCode.INVALID_ARGUMENT:
                    raise ConfigurationError(error.details()) from error
                case grpc.StatusCode.FAILED_PRECONDITION:
                    raise Fatal(f"the broker refuses it: {error.details()}") from error
            text = f"broker at {self._address}: {error.details()}; is the run still going?"
            raise NoAnswer(text) from error


def command_line(command: pb.Command) -> str:
    """Return a command and its answer as a line for people."""
    what = f"{command.action} {command.number}"
    match command.state:
        case pb.COMMAND_STATE_DONE:
            return f"{what}: done, {command.detail} (checkpoint {command.checkpoint_id})"
        case pb.COMMAND_STATE_REFUSED:
            reason = pb.CommandRefusal.Name(command.refusal).removeprefix("COMMAND_REFUSAL_")
            return f"{what}: {reason}: {command.detail}"
        case _:
            return f"{what}: pending, --request-id {command.request_id}"


def message_json(message: Message) -> dict[str, Any]:
    """Return a message as JSON values, under the names of its fields and with empty ones."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
