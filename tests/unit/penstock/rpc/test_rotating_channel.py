"""A channel whose TLS files are replaced while a call is held."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel

PATIENCE_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server over TLS that holds a Watch for as long as nothing changes.

    Its authority lies in `tmp_path`.
    """
    main(Order(folder=tmp_path, run="run-a"))
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    pair = ((tmp_path / "broker.key").read_bytes(), (tmp_path / "broker.pem").read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


def put_anew(path: Path) -> None:
    """The same bytes in a new file, as a rotation that keeps the authority."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(path.read_bytes())
    fresh.replace(path)


def test_close_ends_a_call_that_was_begun_before_the_rotation(address: str, tmp_path: Path) -> None:
    authority = tmp_path / "authority.pem"
    credentials = Credentials.from_files(insecure=False, certificate=None, key=None, authority=authority)
    with closing(open_channel(address, credentials)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        held = stub.Watch(request, timeout=PATIENCE_S)
        assert next(held).status == SERVING
        put_anew(authority)
        assert stub.Check(request, timeout=PATIENCE_S).status == SERVING
        assert held.is_active(), "a rotation ends no call"
        channel.close()
        with pytest.raises(grpc.RpcError):
            next(held)
        assert held.code() is grpc.StatusCode.CANCELLED
