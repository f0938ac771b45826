"""A Redis that is down, unsuitable, killed, frozen, filled anew or on a full disk."""

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.script import LAYOUT
from penstock.protocol.refusal import Reason, Refusal
from penstock.v1 import control_pb2, control_pb2_grpc
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, eventually, launch, open_run
from tests.support.run.simulated_actor import SimulatedActor, code_of, refusal_of
from tests.support.run.small_run import CHARGE, fragment
from tests.support.storage.redis_server import Binary, RedisServer
from tests.support.storage.small_disk import KINDS, SmallDisk, small_disk


def test_a_redis_that_starts_late_is_used(tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.kill()
    broker = launch(redis_server.url, tmp_path)
    eventually(lambda: "waiting for redis" in broker.log.read_text(), "the message")
    redis_server.start()
    eventually(broker.is_ready, "readiness")
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
    short_folder: Path,
    options: tuple[str, ...],
    settings: dict[str, dict[str, str]],
    expected: str,
) -> None:
    with harness.redis(short_folder, *options) as server:
        code, last = launch(server.url, tmp_path, settings=settings).wait()
    assert code == 2
    assert expected in last


@pytest.mark.promise("redis-away-actors-wait")
def test_while_redis_is_away_actors_are_told_to_wait(tmp_path: Path, redis_server: RedisServer) -> None:
    learner = open_run(redis_server.url)
    with harness.broker(redis_server.url, tmp_path) as broker, SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        assert actor.send(fragment(actor.session, 1)).acked_through == 1
        redis_server.write_out()
        redis_server.kill()
        away = refusal_of(actor.send(fragment(actor.session, 2)))
        assert away.reason is Reason.FULL
        assert away.retry_after_ms > 0
        assert refusal_of(actor.watch()).reason is Reason.NOT_READY
        with pytest.raises(grpc.RpcError) as caught:
            control_pb2_grpc.ControlServiceStub(actor.channel).Status(control_pb2.StatusRequest(), timeout=5)
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
    assert learner.acked() == 2
    learner.close()


@pytest.mark.promise("redis-away-actors-wait")
def test_a_broker_whose_redis_stays_away_exits(tmp_path: Path, redis_server: RedisServer) -> None:
    with harness.broker(redis_server.url, tmp_path, settings={"broker": {"redis_wait_s": 2}}) as broker:
        redis_server.kill()
        code, last = broker.wait()
    assert code == 1
    assert "redis_wait_s" in last


@pytest.mark.promise("redis-whose-settings-lose")
def test_a_redis_that_returns_unsuitable_ends_the_broker(tmp_path: Path, redis_server: RedisServer) -> None:
    with harness.broker(redis_server.url, tmp_path) as broker:
        redis_server.kill()
        redis_server._options = ("--appendonly", "no")
        redis_server.start()
        code, last = broker.wait()
    assert code == 1
    assert "broker.durability" in last


@pytest.mark.promise("broker-remembers-run-ends")
def test_a_broker_serves_a_run_started_anew_in_its_redis(redis_server: RedisServer, tmp_path: Path) -> None:
    first = open_run(redis_server.url, unroll_length=1)
    with (
        harness.broker(redis_server.url, tmp_path) as broker,
        SimulatedActor(broker.address, "actor-0") as before,
        SimulatedActor(broker.address, "actor-1") as after,
    ):
        before.open()
        assert before.send(fragment(before.session)).refusal.detail.startswith("fragments[0]")
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
        second = open_run(redis_server.url)
        before.watch()  # the first call that meets another incarnation is to be asked again
        after.open()
        assert not after.send(fragment(after.session)).HasField("refusal")
    first.close()
    second.close()


@pytest.mark.promise("brokers-learners-meet-run")
def test_a_run_of_another_layout_ends_the_broker(redis_server: RedisServer, tmp_path: Path) -> None:
    log = open_run(redis_server.url)
    with harness.broker(redis_server.url, tmp_path) as broker:
        with redis.Redis.from_url(redis_server.url) as client:
            client.hset(keys.STATE, "layout", LAYOUT + 1)
        code, last = broker.wait()
    assert code == 1
    assert f"has layout {LAYOUT + 1}, this release has layout {LAYOUT}" in last
    assert "of one release" in last
    log.close()


LEFT_BYTES = 64 * 1024
PATIENCE_S = 60.0
MOST_APPENDS = 2000


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, short_folder: Path, server: RedisServer) -> Iterator[SmallDisk]:
    """A small disk under the server's folder; the server runs on it."""
    with small_disk(request.param, short_folder, lambda: server.pid if server._process else None) as disk:
        server.start()
        yield disk
        server.kill()


@pytest.fixture(params=["everysec", "always"])
def server(request: pytest.FixtureRequest, redis_binary: Binary, short_folder: Path) -> RedisServer:
    return RedisServer(redis_binary, short_folder, "--appendfsync", request.param)


@pytest.fixture
def log(server: RedisServer, disk: SmallDisk) -> Iterator[LearnerLog]:
    log = open_run(server.url, budget=2 * MOST_APPENDS * CHARGE)
    yield log
    log.close()


@pytest.fixture
def broker(server: RedisServer, log: LearnerLog, tmp_path: Path) -> Iterator[BrokerProcess]:
    with harness.broker(server.url, tmp_path) as broker:
        yield broker


@pytest.fixture
def actor(broker: BrokerProcess) -> Iterator[SimulatedActor]:
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        yield actor


def append(actor: SimulatedActor) -> Refusal | None:
    """Send the next fragment; why it was not taken."""
    reply = actor.send(fragment(actor.session, actor.acked_through + 1))
    return Refusal.from_proto(reply.refusal)


def append_until_refused(actor: SimulatedActor) -> Refusal:
    for _ in range(MOST_APPENDS):
        refusal = append(actor)
        if refusal is not None:
            return refusal
    raise AssertionError("the disk did not fill up")


def is_always(server: RedisServer) -> bool:
    """At this level Redis ends itself rather than acknowledge what it cannot write."""
    return server._options[-1] == "always"


def bring_back(server: RedisServer, disk: SmallDisk, log: LearnerLog) -> None:
    """Room again; a server that has ended itself is started again, the learner opens the log."""
    disk.free()
    if is_always(server):
        server.restart()
        log.reopen(log.snapshot())
        log.publish(b"weights-2", update=1, settled=0, scalars={})


def sequences(log: LearnerLog) -> list[int]:
    return [entry.header.sequence for entry in log.read(0, 2 * MOST_APPENDS, 0) if entry.header is not None]


def test_a_full_disk_refuses_appends_until_it_has_room(
    server: RedisServer, disk: SmallDisk, log: LearnerLog, broker: BrokerProcess, actor: SimulatedActor
) -> None:
    assert append(actor) is None
    disk.fill(LEFT_BYTES)
    assert append_until_refused(actor).reason is Reason.FULL
    acked = actor.acked_through
    assert acked > 1
    eventually(lambda: broker.get("/readyz")[0] == 503, "red readiness", PATIENCE_S)
    assert broker.get("/healthz") == (200, "ok\n")  # to start this broker again would not help
    if not is_always(server):
        assert "append-only file" in broker.get("/readyz")[1]
        assert {append(actor).reason for _ in range(5)} == {Reason.FULL}  # type: ignore[union-attr]
        assert actor.acked_through == acked
    bring_back(server, disk, log)
    eventually(lambda: append(actor) is None, "an acknowledgement", PATIENCE_S)
    eventually(broker.is_ready, "readiness", PATIENCE_S)
    assert sequences(log) == list(range(1, actor.acked_through + 1))
    server.restart()
    log.reopen(log.snapshot())
    assert sequences(log) == list(range(1, actor.acked_through + 1))
    assert (log.acked(), log.log_lost()) == (actor.acked_through, 0)


def test_unwritten_fragments_of_a_redis_killed_on_a_full_disk_are_booked(
    server: RedisServer, disk: SmallDisk, log: LearnerLog, actor: SimulatedActor
) -> None:
    disk.fill(LEFT_BYTES)
    append_until_refused(actor)
    acked = actor.acked_through
    server.kill()
    disk.free()
    server.start()
    log.reopen(log.snapshot())
    log.publish(b"weights-2", update=1, settled=0, scalars={})
    kept = len(sequences(log))
    assert kept <= acked if not is_always(server) else kept >= acked
    # The first call that meets another incarnation of the run is to be asked again.
    eventually(lambda: not actor.watch().HasField("refusal"), "an answer", PATIENCE_S)
    eventually(lambda: append(actor) is None, "an acknowledgement", PATIENCE_S)
    assert log.acked() == actor.acked_through
    assert log.log_lost() == max(0, acked - kept)
    assert len(sequences(log)) + log.log_lost() == log.acked()
