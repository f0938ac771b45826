"""Channels beside a proxy that the environment names, as it does in many companies."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_async_channel, open_channel

PATIENCE_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
ASKED = health_pb2.HealthCheckRequest()


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server on loopback."""
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0)


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A proxy that takes no call, for every way in which gRPC learns of one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield listening


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_what_is_for_this_machine_passes_no_proxy(host: str, port: int, proxy: socket.socket) -> None:
    address = f"{host}:{port}"

    async def ask() -> health_pb2.HealthCheckResponse:
        async with open_async_channel(address, Credentials()) as channel:
            return await health_pb2_grpc.HealthStub(channel).Check(ASKED, timeout=PATIENCE_S)

    with open_channel(address, Credentials()) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(ASKED, timeout=PATIENCE_S).status == SERVING
    assert asyncio.run(ask()).status == SERVING
    with pytest.raises(BlockingIOError):
        proxy.accept()
