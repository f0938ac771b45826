"""What a caller is answered counts until it has been read, as a message or as bytes."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from penstock.protocol.limits import MIB
from penstock.rpc.gate import Boundary, Gate, RateLimits, Rates
from penstock.v1 import weights_pb2 as pb

LARGE = bytes(3 * MIB)


class Aborted(Exception):
    """As gRPC ends a call."""


class Call:
    """A call over TCP whose reply is not read yet."""

    def __init__(self) -> None:
        self.on_read: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        """The same connection each time."""
        return "ipv4:127.0.0.1:40000"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called when the reply has left."""
        self.on_read.append(callback)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        """Ends the call."""
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        raise Aborted(text)


class Details:
    """What an interceptor is told of a call."""

    method = "/a.Service/Get"
    invocation_metadata = ()


@pytest.mark.parametrize("reply", [LARGE, pb.GetWeightsReply(chunk=LARGE)], ids=["bytes", "message"])
async def test_who_does_not_read_is_answered_no_more(reply: Any) -> None:
    async def get(_request: bytes, _context: Any) -> Any:
        return reply

    async def handler(_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(get)

    gate = Gate(Boundary(), RateLimits(Rates(calls=1e6, bytes=1e12)))
    gated = await gate.intercept_service(handler, Details())  # type: ignore[arg-type]
    first = Call()
    assert await gated.unary_unary(b"", first) is reply
    with pytest.raises(Aborted, match="are not read yet"):
        await gated.unary_unary(b"", Call())
    first.on_read[0](first)
    assert await gated.unary_unary(b"", Call()) is reply
