"""Calls below every stub: raw bytes to any RPC of the broker, and what came back.

The table of RPCs is read from the descriptors, so that a new RPC is attacked without being named here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.v1 import control_pb2, experience_pb2, weights_pb2
from tests.support.run.simulated_actor import code_of

DEADLINE_S: Final = 60
_FILES: Final = (experience_pb2, weights_pb2, control_pb2, health_pb2)


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method by its path, and the message that it takes."""

    path: str
    request: type[Message]

    def __str__(self) -> str:
        """Name in test ids."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a reply, or the status that ended the call."""

    code: grpc.StatusCode
    text: str = ""
    data: bytes = b""


def unary_rpcs() -> list[Rpc]:
    """Every unary RPC that a broker serves."""
    return [
        Rpc(f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type))
        for file in _FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.server_streaming and not method.client_streaming
    ]


class RawChannel:
    """One connection without limits of its own; calls block."""

    def __init__(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> None:
        limits = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
        kept = [option for option in CHANNEL_OPTIONS if option[0] not in dict(limits)]
        self.channel = grpc.insecure_channel(address, options=[*kept, *limits, *options])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.channel.close()

    def send(self, path: str, data: bytes, **options: Any) -> Answer:
        """One call with these bytes as its message."""
        return answer_of(self.start(path, data, **options))

    def start(self, path: str, data: bytes, **options: Any) -> Any:
        """The same, not waited for."""
        call = self.channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        return call.future(data, **{"timeout": DEADLINE_S, **options})


def answer_of(future: Any) -> Answer:
    """What a started call ended with."""
    try:
        return Answer(grpc.StatusCode.OK, data=bytes(future.result()))
    except grpc.RpcError as error:
        return Answer(*code_of(error))
