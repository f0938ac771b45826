"""A connection without calls stays: no ban for its keep-alive pings, no error at the next call."""

import threading
from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # missing in the stubs

from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.runtime.server_frame import SERVER_OPTIONS
from tests.support.network.network_run import append, network_run
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.storage.redis_server import RedisServer


def test_clients_ping_less_often_than_servers_allow() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= 2 * allowed_ms
    assert server["grpc.keepalive_permit_without_calls"] == client["grpc.keepalive_permit_without_calls"] == 1


def test_every_option_is_one_that_grpc_knows() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS):
        assert name.encode() in library, name


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [1, pytest.param(250, marks=pytest.mark.slow)])
def test_an_idle_connection_is_kept(redis_server: RedisServer, tmp_path: Path, seconds: float) -> None:
    with (
        network_run(redis_server, tmp_path, session_timeout_ms=7_200_000) as run,
        SimulatedActor(run.proxy.address, "a-0") as actor,
    ):
        actor.open()
        assert append(actor, 1).acked_through == 1
        threading.Event().wait(seconds)
        assert append(actor, 2).acked_through == 2
        assert run.proxy.goodbyes == 0
        assert len(run.proxy.accepted_s) == 1
