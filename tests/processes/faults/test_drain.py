"""SIGTERM: every role ends in its order, within its deadlines, with nothing acknowledged lost.

actor: no more steps ─► outbox flushed, at most 10 s ─► session closed.  broker: not ready ─► delay ─►
NOT_SERVING ─► held and begun calls end.  learner: checkpoint ─► commit ─► lease released.
"""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.actor.link import outbox
from penstock.actor.rollout import loop
from penstock.broker.log import keys
from penstock.broker.log.script import load as script
from penstock.config.settings import load
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.runtime import metrics
from tests.support.fleet.crowd_actor import Load, SimulatedActor
from tests.support.network.network_run import (
    PATIENCE_S,
    NetworkRun,
    append,
    await_credit,
    network_run,
    own_fragment,
)
from tests.support.run import simulated_actor
from tests.support.run.harness import eventually
from tests.support.run.learner_run import BATCH, Producer, learner_process, settings, until
from tests.support.storage.redis_server import RedisServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def follow_health(address: str, seen: list[int]) -> None:
    """Note every status that the standard health service tells, until it no longer serves."""
    with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
        for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            seen.append(reply.status)
            if reply.status == NOT_SERVING:
                return


@pytest.mark.promise("sigterm-ends-role-order")
def test_a_draining_broker_serves_until_balancers_know(redis_server: RedisServer, tmp_path: Path) -> None:
    delayed = {"broker": {"drain_delay_s": 3}}
    with (
        network_run(redis_server, tmp_path, settings=delayed) as run,
        simulated_actor.SimulatedActor(run.broker.address, "a-0") as actor,
        simulated_actor.SimulatedActor(run.broker.address, "a-1") as held_actor,
        ThreadPoolExecutor(2) as pool,
    ):
        statuses: list[int] = []
        watching = pool.submit(follow_health, run.broker.address, statuses)
        actor.open()
        held_actor.open()
        append(actor, 1)
        held = pool.submit(
            held_actor.watch, wait_ms=25_000, known_version=2**40, known_begin_through=2**40, known_revision=9
        )
        eventually(lambda: run.metric("penstock_watchers") == 1 and statuses, "the held calls")
        run.broker.process.send_signal(signal.SIGTERM)
        eventually(lambda: run.broker.get("/readyz")[0] == 503, "red readiness")
        assert "draining" in run.broker.get("/readyz")[1]
        assert append(actor, 2).acked_through == 2
        assert not held.done()
        assert statuses == [SERVING]
        assert held.result(PATIENCE_S).leave.begin_through >= 0
        watching.result(PATIENCE_S)
        assert statuses == [SERVING, NOT_SERVING]
        assert run.broker.wait()[0] == 0
        assert run.reader.log.acked() == 2


@pytest.mark.promise("sigterm-ends-role-order")
def test_a_draining_broker_answers_the_calls_that_have_begun(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with (
        network_run(redis_server, tmp_path) as run,
        simulated_actor.SimulatedActor(run.broker.address, "a-0") as actor,
        ThreadPoolExecutor(1) as pool,
    ):
        actor.open()
        append(actor, 1)
        await_credit(actor, 2)
        os.kill(redis_server.pid, signal.SIGSTOP)
        begun = pool.submit(actor.send, own_fragment(actor.session, 2))
        eventually(lambda: run.metric("penstock_staged_bytes") > 0, "the append to begin")
        run.broker.process.send_signal(signal.SIGTERM)
        eventually(lambda: is_refused(run), "the broker to take no more calls")
        assert run.broker.process.poll() is None
        os.kill(redis_server.pid, signal.SIGCONT)
        assert begun.result(PATIENCE_S).acked_through == 2
        assert run.broker.wait()[0] == 0
        assert run.reader.log.acked() == 2


def is_refused(run: NetworkRun) -> bool:
    with grpc.insecure_channel(run.broker.address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return True
    return False


@pytest.mark.slow
def test_a_broker_whose_redis_hangs_still_ends(redis_server: RedisServer, tmp_path: Path) -> None:
    with (
        network_run(redis_server, tmp_path) as run,
        simulated_actor.SimulatedActor(run.broker.address, "a-0") as actor,
        ThreadPoolExecutor(1) as pool,
    ):
        actor.open()
        append(actor, 1)
        await_credit(actor, 2)
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            begun = pool.submit(actor.send, own_fragment(actor.session, 2))
            eventually(lambda: run.metric("penstock_staged_bytes") > 0, "the append to begin")
            run.broker.process.send_signal(signal.SIGTERM)
            assert simulated_actor.refusal_of(begun.result(PATIENCE_S)).retry_after_ms > 0
            assert run.broker.wait()[0] == 0
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)


def start_actor(run: NetworkRun) -> tuple[SimulatedActor, float]:
    """A rollout worker behind the proxy that has sent something, and the fragments built before it."""
    built = metrics.FRAGMENTS_BUILT._value.get()
    actor = SimulatedActor(run.proxy.address, "a-0", Load(slots=2), load([{"metrics": {"port": 0}}]))
    actor.start()
    eventually(lambda: run.reader.log.acked() >= 8, "experience", PATIENCE_S)
    return actor, built


@pytest.mark.promise("sigterm-ends-role-order")
def test_an_actor_flushes_its_outbox_and_closes_its_session(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = metrics.FRAGMENTS_ABANDONED.labels("drain")
    with network_run(redis_server, tmp_path) as run:
        before = abandoned._value.get()
        actor, built = start_actor(run)

        def holds() -> bool:
            run.proxy.set(delay_s=0.2, blackhole=False)
            eventually(lambda: metrics.OUTBOX_FRAGMENTS._value.get() > 1, "a full outbox")
            run.proxy.set(blackhole=True)
            return bool(metrics.OUTBOX_FRAGMENTS._value.get() > 1)

        def heal(name: str, _sequence: int = 0) -> None:
            if name == "outbox.flushing":
                run.proxy.heal()

        monkeypatch.setattr(outbox, "failpoint", heal)
        eventually(holds, "an outbox that holds something")
        actor.drain("test")
        assert actor.join(PATIENCE_S)
        assert run.reader.log.acked() == metrics.FRAGMENTS_BUILT._value.get() - built
        assert run.open_sessions() == 0
        assert abandoned._value.get() == before


@pytest.mark.parametrize("flush_s", [1.0, pytest.param(loop.FLUSH_S, marks=pytest.mark.slow)])
def test_an_actor_without_a_broker_gives_up_its_flush(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush_s: float
) -> None:
    monkeypatch.setattr(loop, "FLUSH_S", flush_s)
    abandoned = metrics.FRAGMENTS_ABANDONED.labels("drain")
    with network_run(redis_server, tmp_path) as run:
        before = abandoned._value.get()
        actor, built = start_actor(run)
        # Credit comes over the same line: a slow one fills the outbox, and then nothing comes through.
        # What was built since the line is slow is not acknowledged yet.
        run.proxy.set(delay_s=0.5)
        slow_since = metrics.FRAGMENTS_BUILT._value.get()
        eventually(
            lambda: (
                metrics.FRAGMENTS_BUILT._value.get() > slow_since + 1
                and metrics.OUTBOX_FRAGMENTS._value.get() > 1
            ),
            "an outbox that fills",
        )
        run.proxy.set(blackhole=True)
        actor.drain("test")
        assert actor.join(PATIENCE_S)
        left = abandoned._value.get() - before
        assert left > 0
        acked = run.reader.log.acked()
        made = metrics.FRAGMENTS_BUILT._value.get() - built
        # A reply that the black hole swallowed leaves fragments in the log that the actor counts as left
        # behind.
        assert made - left <= acked <= made


@pytest.mark.promise("sigterm-ends-role-order")
def test_a_learner_checkpoints_commits_and_releases_the_lease(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    endless = settings(learner={"total_steps": 10**9, "checkpoint_interval_s": 3600, "stop_at_target": False})
    with Producer(redis_server.url) as producer:
        process = learner_process(redis_server.url, tmp_path, endless)
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 3)
        calls: list[str] = []
        heard = threading.Thread(target=listen, args=(redis_server, calls), daemon=True)
        heard.start()
        until(lambda: calls, "the monitor")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        with redis.Redis.from_url(redis_server.url) as client:
            client.echo("over")
        heard.join(PATIENCE_S)
        commit, release = calls.index("commit"), calls.index("release")
        assert commit < release
        assert not {"commit", "publish"} & set(calls[release:])
        newest = CheckpointStore(tmp_path / "checkpoints", 3)
        checkpoint = newest.read(newest.ids()[0])
        account = json.loads((tmp_path / "learner.json").read_text())
        assert checkpoint.state["position"] == account["ledger"]["trained"] >= 3 * BATCH // 8
        assert account["ledger"]["balanced"]
        with redis.Redis.from_url(redis_server.url) as client:
            assert client.hget(keys.STATE, "holder") is None


def listen(server: RedisServer, calls: list[str]) -> None:
    names = {script(name).sha1: name for name in ("renew", "commit", "publish", "release", "trim", "watch")}
    with redis.Redis.from_url(server.url, socket_timeout=None) as client, client.monitor() as monitor:
        for command in monitor.listen():
            words = command["command"].split()
            if words[:2] == ["ECHO", "over"]:
                return
            if words[0] == "EVALSHA" and words[1] in names:
                calls.append(names[words[1]])
