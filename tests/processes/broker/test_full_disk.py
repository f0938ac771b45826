"""The disk under the append-only file fills up: nothing is acknowledged that Redis did not keep."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.log.learner_log import LearnerLog
from penstock.protocol.refusal import Reason, Refusal
from tests.support.run.harness import BrokerProcess, eventually, launch, open_run
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import CHARGE, fragment
from tests.support.storage.redis_server import Binary, RedisServer
from tests.support.storage.small_disk import KINDS, SmallDisk, small_disk

LEFT_BYTES = 64 * 1024
PATIENCE_S = 60.0
MOST = 2000


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
    log = open_run(server.url, budget=2 * MOST * CHARGE)
    yield log
    log.close()


@pytest.fixture
def broker(server: RedisServer, log: LearnerLog, tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = launch(server.url, tmp_path)
    eventually(broker.is_ready, "readiness", PATIENCE_S)
    yield broker
    broker.end()


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
    for _ in range(MOST):
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
    return [entry.header.sequence for entry in log.read(0, 2 * MOST, 0) if entry.header is not None]


def test_a_full_disk_under_the_log_refuses_and_goes_on_with_room(
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


def test_what_a_redis_killed_on_a_full_disk_had_not_written_is_booked(
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
