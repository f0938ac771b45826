"""A broker process, a real Redis and actors without policies: the whole way up and down."""

import hashlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.broker.log.learner_log import LearnerLog
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.refusal import Reason
from penstock.v1 import control_pb2, control_pb2_grpc, weights_pb2
from penstock.v1 import experience_pb2 as experience
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, eventually, open_run
from tests.support.run.simulated_actor import SimulatedActor, refusal_of
from tests.support.run.small_run import CHARGE, RUN, fragment
from tests.support.storage.redis_server import RedisServer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, RedisServer]]:
    """One broker for most tests: it keeps nothing of a run, so Redis is emptied between them."""
    with harness.redis() as server, harness.broker(server.url, tmp_path_factory.mktemp("broker")) as process:
        yield process, server


@pytest.fixture
def redis_url(shared: tuple[BrokerProcess, RedisServer]) -> str:
    redis.Redis.from_url(shared[1].url).flushall()
    return shared[1].url


@pytest.fixture
def broker(shared: tuple[BrokerProcess, RedisServer], redis_url: str) -> BrokerProcess:
    return shared[0]


@pytest.fixture
def learner(broker: BrokerProcess, redis_url: str) -> Iterator[LearnerLog]:
    log = open_met_run(broker, redis_url)
    yield log
    log.close()


def newest(known: weights_pb2.WatchLatestReply) -> dict[str, Any]:
    """What a watch says that is only to end with news."""
    return {
        "known_version": known.latest.version,
        "known_begin_through": known.leave.begin_through,
        "known_revision": known.revision,
    }


def open_met_run(broker: BrokerProcess, redis_url: str, weights: bytes = b"weights-1") -> LearnerLog:
    """Open a run, and have the broker meet it: it remembers that of the test before."""
    log = open_run(redis_url, weights=weights)
    with SimulatedActor(broker.address, "first") as actor:
        actor.session = 1
        eventually(lambda: refusal_of(actor.watch()).reason is not Reason.NOT_READY, "this run at the broker")
    return log


def test_fragments_are_read_from_the_log_unchanged(broker: BrokerProcess, learner: LearnerLog) -> None:
    with SimulatedActor(broker.address, "a-1") as actor:
        opened = actor.open()
        assert opened.specification.run == RUN
        reply = actor.send_all_with_credit()
    assert reply.acked_through >= 1
    assert not reply.refusal.reason
    assert reply.durability in (experience.DURABILITY_FSYNC_1S, experience.DURABILITY_FSYNC)
    entries = learner.read(0, 100, 0)
    assert [entry.header.sequence for entry in entries if entry.header] == list(
        range(1, reply.acked_through + 1)
    )
    payloads = learner.fetch([entry.number for entry in entries])
    assert payloads == [fragment(actor.session, entry.number).payload for entry in entries]


@pytest.mark.promise("fragment-sent-again-acknowledged")
def test_a_repeated_append_is_acknowledged_and_stored_once(
    broker: BrokerProcess, learner: LearnerLog
) -> None:
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        for _ in range(3):
            assert actor.send(fragment(actor.session, 1)).acked_through == 1
    assert learner.acked() == 1
    assert learner.residue(0).entries == 1


@pytest.mark.promise("within-session-log-holds")
def test_a_missing_sequence_number_is_a_gap(broker: BrokerProcess, learner: LearnerLog) -> None:
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        refusal = refusal_of(actor.send(fragment(actor.session, 2)))
    assert (refusal.reason, refusal.expected) == (Reason.GAP, 1)


def test_a_watch_is_held_until_the_learner_publishes(broker: BrokerProcess, learner: LearnerLog) -> None:
    with SimulatedActor(broker.address, "a-1") as actor, ThreadPoolExecutor(1) as pool:
        actor.open()
        known = actor.watch()
        assert known.weights == b"weights-1"
        held = pool.submit(actor.watch, wait_ms=20_000, **newest(known))
        eventually(lambda: "penstock_watchers 1.0" in broker.get("/metrics")[1], "the held call")
        published = learner.publish(b"weights-2", update=1, settled=0, scalars={"epsilon": 0.5})
        reply = held.result(timeout=5)
    assert reply.latest.version == published.version
    assert reply.weights == b"weights-2"
    assert reply.latest.sha256 == hashlib.sha256(b"weights-2").hexdigest()
    assert reply.scalars == {"epsilon": 0.5}


def test_large_weights_come_in_chunks_from_any_offset(redis_url: str, broker: BrokerProcess) -> None:
    blob = bytes(range(256)) * 10_000
    log = open_met_run(broker, redis_url, blob)
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        news = actor.watch()
        assert news.weights == b""
        got, offset = b"", 0
        for size in (None, 1000, None, None, None):
            request = weights_pb2.GetWeightsRequest(
                session=actor.session, version=news.latest.version, offset=offset
            )
            chunk = actor.weights.GetWeights(request, timeout=5).chunk[:size]
            assert len(chunk) <= WEIGHT_CHUNK_BYTES
            got, offset = got + chunk, offset + len(chunk)
    assert got == blob
    assert news.latest.sha256 == hashlib.sha256(got).hexdigest()
    log.close()


def test_control_reaches_actors_and_status_shows_the_run(broker: BrokerProcess, learner: LearnerLog) -> None:
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        actor.send_all_with_credit()
        known = actor.watch()
        control = control_pb2_grpc.ControlServiceStub(actor.channel)
        paused = control.Pause(control_pb2.ControlRequest(reason="lunch"), timeout=5)
        news = actor.watch(
            wait_ms=20_000,
            known_version=known.latest.version,
            known_begin_through=99,
            known_revision=known.revision,
        )
        assert (news.state, news.revision) == (weights_pb2.RUN_STATE_PAUSED, paused.revision)
        status = control.Status(control_pb2.StatusRequest(), timeout=5)
        control.Stop(control_pb2.ControlRequest(), timeout=5)
        resumed = control.Resume(control_pb2.ControlRequest(), timeout=5)
        assert resumed.desired == weights_pb2.RUN_STATE_STOPPING
    assert status.run == RUN
    assert status.acked == actor.acked_through == status.log_head
    assert [(row.actor_id, row.role, row.sequence) for row in status.sessions] == [
        ("a-1", "rollout", actor.acked_through)
    ]
    assert status.desired == weights_pb2.RUN_STATE_PAUSED


def test_pages_say_ready_and_show_the_run(broker: BrokerProcess, learner: LearnerLog) -> None:
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        actor.send(fragment(actor.session, 1))
        health = health_pb2_grpc.HealthStub(actor.channel)
        for name in ("", "penstock.v1.ExperienceService"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert broker.get("/healthz")[0] == 200
    page = broker.get("/metrics")[1]
    assert "penstock_fragments_appended_total" in page
    eventually(lambda: "penstock_log_entries 1.0" in broker.get("/metrics")[1], "the monitor's next look")
    eventually(lambda: f"penstock_budget_steps {64 * CHARGE:.1f}" in broker.get("/metrics")[1], "the gauge")


def test_a_drain_answers_the_held_calls_and_exits_cleanly(
    redis_url: str, learner: LearnerLog, tmp_path: Path
) -> None:
    with (
        harness.broker(redis_url, tmp_path) as own_broker,
        SimulatedActor(own_broker.address, "a-1") as actor,
        ThreadPoolExecutor(1) as pool,
    ):
        actor.open()
        known = actor.watch()
        held = pool.submit(actor.watch, wait_ms=20_000, **newest(known))
        eventually(lambda: "penstock_watchers 1.0" in own_broker.get("/metrics")[1], "the held call")
        own_broker.process.send_signal(signal.SIGTERM)
        assert held.result(timeout=5).latest == known.latest
        assert own_broker.wait()[0] == 0


def test_credit_in_the_reply_to_an_append_wakes_no_held_watch(
    broker: BrokerProcess, learner: LearnerLog
) -> None:
    with SimulatedActor(broker.address, "actor-0") as actor, ThreadPoolExecutor(1) as threads:
        actor.open()
        known = actor.watch()
        actor.send_all_with_credit(at_most=8)
        learner.settle(actor.acked_through)
        actor.send_all_with_credit(at_most=1)
        assert actor.begin_through > known.leave.begin_through
        held = threads.submit(actor.watch, wait_ms=20_000, **newest(known))
        eventually(lambda: broker.metric("penstock_watchers") == 1, "the watch to be held")
        learner.publish(b"weights-2", update=1, settled=0, scalars={})
        assert held.result().latest.version > known.latest.version
