"""Servers and channels that find each other."""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.config.settings import BrokerSection
from penstock.rpc.address import AddressInUse
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_async_channel
from penstock.runtime.server_frame import STREAMS_PER_CONNECTION, Front, bind
from tests.support.abuse.wire import RawChannel, answer_of

PLAIN = Credentials()


async def test_a_served_address_answers_health_checks() -> None:
    front = Front(["penstock.v1.ControlService"], BrokerSection())
    address = bind(front.server, "127.0.0.1:0", PLAIN)
    await front.server.start()
    request = health_pb2.HealthCheckRequest(service="penstock.v1.ControlService")
    async with open_async_channel(address, PLAIN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await front.set_serving(serving=True)
        assert (await stub.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
        await front.set_serving(serving=False)
        assert (await stub.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await front.server.stop(None)


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=f"{address}: port in use; choose another"):
            bind(Front([], BrokerSection()).server, address, PLAIN)


async def test_a_served_unix_socket_is_not_taken_over(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    first = Front([], BrokerSection())
    bind(first.server, address, PLAIN)
    await first.server.start()
    with pytest.raises(AddressInUse, match="is in use"):
        bind(Front([], BrokerSection()).server, address, PLAIN)
    await first.server.stop(None)
    with socket.socket(socket.AF_UNIX) as dead:
        (tmp_path / "s").unlink(missing_ok=True)
        dead.bind(str(tmp_path / "s"))
    second = Front([], BrokerSection())
    assert bind(second.server, address, PLAIN) == address
    await second.server.stop(None)


async def test_plaintext_beyond_loopback_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="insecure"):
        bind(Front([], BrokerSection()).server, "0.0.0.0:0", PLAIN)
    with pytest.raises(ValueError, match="insecure"):
        open_async_channel("broker:50051", PLAIN)


async def test_a_message_over_the_limit_is_refused_before_it_is_read() -> None:
    front = Front([], BrokerSection())
    address = bind(front.server, "127.0.0.1:0", PLAIN)
    await front.server.start()
    async with open_async_channel(address, PLAIN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="x" * (9 * 1024 * 1024))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(request, timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await front.server.stop(None)


async def test_calls_that_come_while_the_server_is_busy_wait_for_it() -> None:
    front = Front([], BrokerSection())
    address = bind(front.server, "127.0.0.1:0", PLAIN)
    await front.server.start()
    await front.set_serving(serving=True)
    with ExitStack() as stack:
        channels = [stack.enter_context(RawChannel(address)) for _ in range(24)]
        # The server's event loop is this one: until the wait below it looks at no call.
        calls = [
            channel.start("/grpc.health.v1.Health/Check", b"")
            for channel in channels
            for _ in range(STREAMS_PER_CONNECTION)
        ]
        answers = await asyncio.to_thread(lambda: [answer_of(call) for call in calls])
    await front.server.stop(None)
    assert {(answer.code, answer.text) for answer in answers} == {(grpc.StatusCode.OK, "")}
