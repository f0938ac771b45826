"""The frame of a gRPC server: what its callers see from its first call to its last."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.config.settings import ConfigurationError, Settings
from penstock.rpc.gate import Boundary
from penstock.runtime.server_frame import ServerFrame, setter

SERVICE = "penstock.v1.ControlService"
STATUS = health_pb2.HealthCheckResponse.ServingStatus


def framed(listen: str = "127.0.0.1:0") -> ServerFrame:
    """A server without services."""
    return ServerFrame("broker", (SERVICE,), Settings(), listen, boundary=Boundary())


async def test_a_server_says_that_it_drains_before_it_lets_go_of_the_calls_that_it_holds() -> None:
    frame = framed()
    async with grpc.aio.insecure_channel(frame.bind()) as channel:
        await frame.begin(metrics_port=0)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == STATUS.SERVING
        released: list[bool] = []
        draining = asyncio.create_task(frame.drain(5.0, release=lambda: released.append(True)))
        assert (await watch.read()).status == STATUS.NOT_SERVING
        watch.cancel()
        await asyncio.wait_for(draining, 10)
        assert released == [True]
    await frame.close()


async def test_an_address_that_is_taken_is_a_matter_of_configuration() -> None:
    first = framed()
    address = first.bind()
    with pytest.raises(ConfigurationError, match="in use"):
        framed(address).bind()
    await first.close()


async def test_an_event_is_set_from_another_thread() -> None:
    event = asyncio.Event()
    threading.Thread(target=setter(event)).start()
    await asyncio.wait_for(event.wait(), 10)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab"])
async def test_bytes_that_are_no_message_are_an_invalid_argument_of_a_standard_service_too(
    data: bytes,
) -> None:
    frame = framed()
    async with grpc.aio.insecure_channel(frame.bind()) as channel:
        await frame.begin(metrics_port=0)
        with pytest.raises(grpc.aio.AioRpcError) as single:
            await channel.unary_unary("/grpc.health.v1.Health/Check", None, None)(data, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as many:
            await channel.unary_stream("/grpc.health.v1.Health/Watch", None, None)(data, timeout=10).read()
    assert single.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert many.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await frame.close()
