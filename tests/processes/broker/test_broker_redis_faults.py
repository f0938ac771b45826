"""A Redis that is down, unsuitable, killed or frozen under a broker, and an address that is taken."""

import signal
import socket
from pathlib import Path

import grpc
import pytest
import redis

from penstock.protocol.refusal import Reason
from penstock.v1 import control_pb2, control_pb2_grpc
from tests.support.run.harness import eventually, launch, open_run
from tests.support.run.simulated_actor import SimulatedActor, code_of, refusal_of
from tests.support.run.small_run import fragment
from tests.support.storage.redis_server import Binary, RedisServer


def test_a_redis_that_is_down_is_waited_for_with_a_message_and_given_up(tmp_path: Path) -> None:
    url = "redis://user@127.0.0.1:9/0"
    broker = launch(url, tmp_path, settings={"broker": {"redis_wait_s": 1}})
    code, last = broker.wait()
    assert code == 1
    assert "redis://user@127.0.0.1:9/0" in last
    assert "redis_wait_s" in last
    assert "waiting for redis" in broker.log.read_text()


def test_a_redis_that_comes_up_late_is_served(tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.kill()
    broker = launch(redis_server.url, tmp_path)
    eventually(lambda: "waiting for redis" in broker.log.read_text(), "the message")
    redis_server.start()
    try:
        eventually(broker.is_ready, "readiness")
    finally:
        broker.end()


def test_a_broker_that_waits_for_redis_can_be_ended(tmp_path: Path) -> None:
    broker = launch(f"unix://{tmp_path}/absent.sock", tmp_path)
    eventually(lambda: "waiting for redis" in broker.log.read_text(), "the message")
    broker.process.send_signal(signal.SIGTERM)
    assert broker.wait()[0] == 0


@pytest.mark.promise("redis-whose-settings-lose")
@pytest.mark.parametrize(
    ("options", "settings", "expected"),
    [
        (("--maxmemory-policy", "allkeys-lru"), {}, "maxmemory_policy=allkeys-lru"),
        (("--appendonly", "no"), {}, "broker.durability=fsync_1s"),
        ((), {"broker": {"durability": "fsync"}}, "appendfsync always"),
        (("--maxmemory", "100mb"), {}, "maxmemory=104857600"),
        (("--rename-command", "UNLINK", "drop"), {}, "this server knows no UNLINK"),
        (("--rename-command", "EVALSHA", ""), {}, "this server knows no EVALSHA"),
    ],
)
def test_an_unsuitable_redis_is_refused_at_start(
    tmp_path: Path,
    redis_binary: Binary,
    short_folder: Path,
    options: tuple[str, ...],
    settings: dict[str, dict[str, str]],
    expected: str,
) -> None:
    server = RedisServer(redis_binary, short_folder, *options)
    server.start()
    try:
        code, last = launch(server.url, tmp_path, settings=settings).wait()
    finally:
        server.kill()
    assert code == 2
    assert expected in last


@pytest.mark.parametrize(
    ("url", "listen", "expected"),
    [
        ("http://localhost", "127.0.0.1:0", "broker.redis=http://localhost"),
        ("redis://127.0.0.1:9", "nowhere", "address='nowhere'"),
        ("redis://127.0.0.1:9", "0.0.0.0:0", "plaintext beyond loopback"),
    ],
)
def test_a_bad_address_is_a_usage_error(tmp_path: Path, url: str, listen: str, expected: str) -> None:
    code, last = launch(url, tmp_path, listen=listen).wait()
    assert code == 2
    assert expected in last


def test_a_port_in_use_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, last = launch("redis://127.0.0.1:9", tmp_path, listen=f"127.0.0.1:{port}").wait()
    assert code == 2
    assert f"127.0.0.1:{port}" in last
    assert "in use" in last


@pytest.mark.promise("redis-away-actors-wait")
def test_while_redis_is_away_actors_are_told_to_wait(tmp_path: Path, redis_server: RedisServer) -> None:
    learner = open_run(redis_server.url)
    broker = launch(redis_server.url, tmp_path)
    try:
        eventually(broker.is_ready, "readiness")
        with SimulatedActor(broker.address, "a-1") as actor:
            actor.open()
            assert actor.send(fragment(actor.session, 1)).acked_through == 1
            redis_server.write_out()
            redis_server.kill()
            away = refusal_of(actor.send(fragment(actor.session, 2)))
            assert away.reason is Reason.FULL
            assert away.retry_after_ms > 0
            assert refusal_of(actor.watch()).reason is Reason.NOT_READY
            with pytest.raises(grpc.RpcError) as caught:
                control_pb2_grpc.ControlServiceStub(actor.channel).Status(
                    control_pb2.StatusRequest(), timeout=5
                )
            assert code_of(caught.value)[0] is grpc.StatusCode.UNAVAILABLE
            eventually(lambda: broker.get("/readyz")[0] == 503, "red readiness")
            redis_server.start()
            eventually(broker.is_ready, "readiness after the return")
            closed = refusal_of(actor.send(fragment(actor.session, 2)))
            assert closed.reason is Reason.FULL
            learner.reopen(learner.snapshot())
            learner.publish(b"weights-2", update=1, settled=0, scalars={})
            # The first call that meets another incarnation of the run is to be asked again.
            eventually(lambda: actor.send(fragment(actor.session, 2)).acked_through == 2, "the fragment")
    finally:
        broker.end()
    assert learner.acked() == 2
    learner.close()


def test_a_password_that_redis_refuses_is_a_configuration_error(
    tmp_path: Path, redis_binary: Binary, short_folder: Path
) -> None:
    server = RedisServer(redis_binary, short_folder)
    server.start()
    redis.Redis.from_url(server.url).config_set("requirepass", "right")
    try:
        for password in ("wrong", None):
            settings = {"security": {"redis_password": password}}
            code, last = launch(server.url, tmp_path / str(password), settings=settings).wait()
            assert code == 2
            assert "security.redis_password" in last
        broker = launch(server.url, tmp_path, settings={"security": {"redis_password": "right"}})
        eventually(broker.is_ready, "readiness")
        broker.end()
    finally:
        server.kill()


@pytest.mark.promise("redis-away-actors-wait")
def test_a_broker_whose_redis_stays_away_exits(tmp_path: Path, redis_server: RedisServer) -> None:
    broker = launch(redis_server.url, tmp_path, settings={"broker": {"redis_wait_s": 2}})
    eventually(broker.is_ready, "readiness")
    redis_server.kill()
    code, last = broker.wait()
    assert code == 1
    assert "redis_wait_s" in last


@pytest.mark.promise("redis-whose-settings-lose")
def test_a_redis_that_returns_unsuitable_ends_the_broker(tmp_path: Path, redis_server: RedisServer) -> None:
    broker = launch(redis_server.url, tmp_path)
    eventually(broker.is_ready, "readiness")
    redis_server.kill()
    redis_server._options = ("--appendonly", "no")
    redis_server.start()
    code, last = broker.wait()
    assert code == 1
    assert "broker.durability" in last
