"""The gate: what a caller sees of a request that cannot be served."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.broker.log.store import StoreUnavailable
from penstock.broker.service.process import LARGEST_CALL_BYTES, ORDINARY, RULES, build_boundary
from penstock.broker.service.sessions import check_number
from penstock.config.settings import BrokerSection
from penstock.protocol.limits import MAX_EPISODES_PER_REPORT, MAX_MESSAGE_BYTES, MAX_NUMBER
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_async_channel
from penstock.rpc.gate import Absent, Gate, Malformed, RateLimits, Rates, read_request
from penstock.runtime.server_frame import Front, bind
from penstock.v1 import control_pb2, control_pb2_grpc
from penstock.v1 import experience_pb2 as experience

FAULTS = {
    "malformed": Malformed("reason='malformed': give another"),
    "absent": Absent("version=3: gone"),
    "redis": StoreUnavailable("connection refused by 10.0.0.1"),
    "bug": KeyError("a secret of this process"),
}
STATUS = "/penstock.v1.ControlService/Status"
PAUSE = "/penstock.v1.ControlService/Pause"


class Faulty(control_pb2_grpc.ControlServiceServicer):
    """Raises what the request's reason names."""

    async def Pause(self, request: control_pb2.ControlRequest, context: Any) -> control_pb2.ControlReply:  # noqa: N802
        """Raise, or hang."""
        if request.reason in FAULTS:
            raise FAULTS[request.reason]
        return control_pb2.ControlReply(revision=len(request.reason))


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with a Faulty behind a Gate."""
    gate = Gate(build_boundary(), RateLimits(Rates(calls=1e9, bytes=1e12)))
    front = Front(["penstock.v1.ControlService"], BrokerSection(), interceptors=[gate])
    control_pb2_grpc.add_ControlServiceServicer_to_server(
        Faulty(),  # type: ignore[abstract]  # the other methods stay as they are generated
        front.server,
    )
    address = bind(front.server, "127.0.0.1:0", Credentials())
    await front.server.start()
    # Without the client's own limit, so that what is too large leaves the client.
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened
    await front.server.stop(0)


async def _error(channel: grpc.aio.Channel, request: bytes, method: str = PAUSE) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(method, None, None)(request, timeout=5)
    return caught.value


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("malformed", grpc.StatusCode.INVALID_ARGUMENT),
        ("absent", grpc.StatusCode.NOT_FOUND),
        ("redis", grpc.StatusCode.UNAVAILABLE),
        ("bug", grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_a_handler_raises_has_a_code_of_its_own(
    channel: grpc.aio.Channel, fault: str, code: grpc.StatusCode
) -> None:
    error = await _error(channel, control_pb2.ControlRequest(reason=fault).SerializeToString())
    assert error.code() is code


async def test_no_text_of_an_unforeseen_error_leaves_the_process(channel: grpc.aio.Channel) -> None:
    for fault in ("bug", "redis"):
        error = await _error(channel, control_pb2.ControlRequest(reason=fault).SerializeToString())
        assert "secret" not in str(error.details())
        assert "10.0.0.1" not in str(error.details())


async def test_a_malformed_request_names_the_field(channel: grpc.aio.Channel) -> None:
    error = await _error(channel, control_pb2.ControlRequest(reason="malformed").SerializeToString())
    assert error.details() == "reason='malformed': give another"


@pytest.mark.parametrize(
    "garbage", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab", b"\x08" + b"\xff" * 11]
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    channel: grpc.aio.Channel, garbage: bytes
) -> None:
    error = await _error(channel, garbage)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "PauseRequest" in str(error.details()) or "Pause" in str(error.details())


async def test_a_message_over_the_limit_is_an_invalid_argument_with_the_figures(
    channel: grpc.aio.Channel,
) -> None:
    request = control_pb2.ControlRequest(reason="x" * LARGEST_CALL_BYTES).SerializeToString()
    error = await _error(channel, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{len(request)} bytes, at most {LARGEST_CALL_BYTES}" in str(error.details())


async def test_a_message_far_over_the_limit_is_cut_off_by_the_transport(channel: grpc.aio.Channel) -> None:
    error = await _error(channel, b"\0" * (2 * MAX_MESSAGE_BYTES + 1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_our_own_channel_does_not_send_a_message_over_the_limit() -> None:
    async with open_async_channel("127.0.0.1:9", Credentials()) as channel, asyncio.timeout(5):
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(PAUSE, None, None)(b"\0" * (MAX_MESSAGE_BYTES + 1), timeout=2)


async def test_a_call_that_does_not_exist_is_unimplemented(channel: grpc.aio.Channel) -> None:
    for method in (STATUS, "/penstock.v1.ControlService/Nothing", "/other.Service/Call"):
        error = await _error(channel, b"", method)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_good_call_passes(channel: grpc.aio.Channel) -> None:
    request = control_pb2.ControlRequest(reason="four").SerializeToString()
    reply = await channel.unary_unary(PAUSE, None, None)(request, timeout=5)
    assert control_pb2.ControlReply.FromString(bytes(reply)).revision == 4


@pytest.mark.parametrize("value", [0, 2**53 + 1, 2**64 - 1])
def test_numbers_that_the_broker_never_gives_are_malformed(value: int) -> None:
    with pytest.raises(Malformed, match=f"session={value}"):
        check_number("session", value)


def test_the_largest_report_passes() -> None:
    episode = experience.Episode(
        slot_id=4095, episode_id=2**64 - 1, episode_return=-1e300, length=2**64 - 1, version=2**64 - 1
    )
    report = experience.ReportEpisodesRequest(
        session=MAX_NUMBER, sequence=MAX_NUMBER, episodes=[episode] * MAX_EPISODES_PER_REPORT
    )
    rule, data = RULES["ReportEpisodes"], report.SerializeToString()
    read = read_request("ReportEpisodes", report.FromString, data, rule.largest_bytes)
    assert len(read.episodes) == MAX_EPISODES_PER_REPORT


@pytest.mark.parametrize("name", ["Append", "ReportEpisodes", "WatchLatest", "Pause", "Check"])
def test_every_rpc_has_a_largest_request(name: str) -> None:
    largest = RULES.get(name, ORDINARY).largest_bytes
    assert largest is not None
    assert len(read_request(name, None, bytes(largest), largest)) == largest
    with pytest.raises(Malformed, match=f"{largest + 1} bytes, at most {largest}"):
        read_request(name, None, bytes(largest + 1), largest)
