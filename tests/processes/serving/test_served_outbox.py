"""Experience of clients on its way into a real log.

Numbered when it is sent, refused, stale or full as it comes.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.outbox import Outbox
from penstock.actor.link.session import Session, open_session
from penstock.actor.serving.experience import NumberedWhenSent, ServedQueue
from penstock.broker.log.replies import Commit
from penstock.client import PolicyClient
from penstock.client.calls import to_parts
from penstock.launch.run.supervisor import penstock
from penstock.protocol.fragment import Fragment, Slot, WeightSpan, check
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason
from penstock.rpc.auth import Credentials
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.lifecycle import Lifecycle
from penstock.v1 import policy_pb2 as pb
from penstock.v1.control_pb2 import ControlRequest
from penstock.v1.control_pb2_grpc import ControlServiceStub
from penstock.v1.policy_pb2_grpc import PolicyServiceStub
from tests.support.run import harness
from tests.support.run.actor_run import Plan, ScriptedLearner
from tests.support.run.harness import (
    PATIENCE_S,
    BrokerProcess,
    Training,
    eventually,
    open_run,
    wait_until_gone,
)
from tests.support.run.serving_run import SERVICE, terminate
from tests.support.run.small_run import CHARGE, RUN, SCHEMA, STEPS, fragment
from tests.support.storage.redis_server import RedisServer

SERVER: Final = "server-0"
PLAYED: Final = 12


@pytest.fixture
def opened(broker: BrokerProcess) -> Iterator[Callable[[], Session]]:
    """Opens sessions of a policy server; closes them."""
    broker_client, sessions = BrokerClient(broker.address, Credentials()), list[Session]()

    def make() -> Session:
        session = open_session(broker_client, SERVER, Role.SERVER, Lifecycle("server"))
        assert session is not None
        session.start()
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close(politely=not session.is_over)
    broker_client.close()


def served(number: int, update: int = 0) -> Fragment:
    """A fragment without session or number that shows which one it is."""
    tensors: dict[str, Any] = {"reward": np.full((STEPS, 2), number, np.float32)}
    made = fragment(1, number, **tensors)
    span = WeightSpan(0, 0, STEPS, 1, update)
    return replace(made, header=replace(made.header, weights=(span,)))


def stored(log: Any) -> list[tuple[int, int]]:
    found = []
    for entry in log.read(0, 1000, 20):
        (payload,) = log.fetch([entry.number])
        taken = Fragment(entry.header, payload)
        check(taken, SCHEMA, RUN)
        rewards: Any = taken.arrays()["reward"]
        found.append((taken.header.sequence, int(rewards[0, 0])))
    return found


def not_learned(reason: str) -> float:
    value: float = metrics.NOT_LEARNED_STEPS.labels(reason)._value.get()
    return value


def test_fragments_are_numbered_when_sent(
    broker: BrokerProcess, redis_url: str, opened: Callable[[], Session]
) -> None:
    log, queue = open_run(redis_url), ServedQueue(100, 0)
    for number in range(1, 6):
        assert queue.put(served(number))
    first = Outbox(opened(), NumberedWhenSent(queue))
    first.start()
    assert first.flush(20)
    assert stored(log) == [(number, number) for number in range(1, 6)]
    first._session.close(politely=True)
    queue.put(served(6))
    second = Outbox(opened(), NumberedWhenSent(queue))
    second.start()
    assert second.flush(20)
    assert stored(log)[5:] == [(1, 6)]
    log.close()


@pytest.mark.promise("policy-server-numbers-fragments")
def test_fragments_refused_as_full_are_numbered_again(
    broker: BrokerProcess, redis_url: str, opened: Callable[[], Session]
) -> None:
    log, queue = open_run(redis_url, max_log_entries=4, budget=1000 * CHARGE), ServedQueue(100, 0)
    before = _refusals("full")
    for number in range(1, 13):
        queue.put(served(number))
    outbox = Outbox(opened(), NumberedWhenSent(queue))
    outbox.start()
    taken: list[tuple[int, int]] = []
    eventually(lambda: _refusals("full") > before, "a refusal")
    position = 0

    def drain() -> bool:
        nonlocal position
        entries = log.read(position, 1000, 20)
        for entry in entries:
            (payload,) = log.fetch([entry.number])
            assert entry.header is not None
            assert payload is not None
            rewards: Any = Fragment(entry.header, payload).arrays()["reward"]
            taken.append((entry.header.sequence, int(rewards[0, 0])))
            position = entry.number
        if entries:
            log.settle(position)
            made = f"checkpoint-{position}"
            log.commit(Commit(checkpoint_id=made, manifest_sha256="0" * 64, position=position, trim=position))
        return len(taken) == 12

    eventually(drain, "all twelve", within_s=60)
    assert taken == [(number, number) for number in range(1, 13)]
    eventually(lambda: outbox.acked_through == 12, "acknowledgement")
    log.close()


def _refusals(reason: str) -> float:
    value: float = metrics.REFUSALS.labels(reason)._value.get()
    return value


@pytest.mark.promise("policy-server-numbers-fragments")
def test_stale_fragments_are_dropped_before_they_have_a_number(
    broker: BrokerProcess, redis_url: str, opened: Callable[[], Session]
) -> None:
    log, queue = open_run(redis_url), ServedQueue(100, 5)
    for update in range(1, 9):
        log.publish(b"weights", update=update, settled=0, scalars={})
    before = not_learned("stale")
    session = opened()
    eventually(lambda: session.weights and session.weights.publication.update == 8, "the newest weights")
    for number, update in enumerate((1, 2, 3, 8), 1):
        queue.put(served(number, update))
    outbox = Outbox(session, NumberedWhenSent(queue))
    outbox.start()
    assert outbox.flush(20)
    assert stored(log) == [(1, 3), (2, 4)]
    assert not_learned("stale") == before + 2 * STEPS
    log.close()


def test_a_session_that_ends_counts_its_unacknowledged_fragments_as_lost(
    broker: BrokerProcess, redis_url: str, opened: Callable[[], Session]
) -> None:
    log, queue = open_run(redis_url), ServedQueue(100, 0)
    wrong = served(1)
    queue.put(replace(wrong, header=replace(wrong.header, schema_id="0" * 64)))
    session = opened()
    outbox = Outbox(session, NumberedWhenSent(queue))
    outbox.start()
    eventually(lambda: session.is_over, "the end of the session")
    assert session.ended is not None
    assert session.ended.reason is Reason.INVALID
    before = not_learned("lost")
    queue.put(served(2))
    assert outbox.drop("invalid") == 1
    assert not_learned("lost") == before + STEPS
    run_follower = Outbox(opened(), NumberedWhenSent(queue))
    run_follower.start()
    assert run_follower.flush(20)
    assert stored(log) == [(1, 2)]
    log.close()


def test_a_server_told_to_end_delivers_finished_steps(
    redis_server: RedisServer, broker: BrokerProcess, tmp_path: Path
) -> None:
    learner = ScriptedLearner(redis_server.url, Plan(environment={"id": "CartPole-v1", "count": 1}))
    learner.publish()
    with (
        harness.server(tmp_path, broker=broker.address) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        with PolicyClient(server.address, deadline_s=60.0) as client:
            eventually(lambda: client.describe().versions, "weights")
            episode = client.start_episode("a")
            assert episode.learned
            for step in range(3):
                episode.act(np.full(4, step / 10, np.float32), reward=1.0 if step else None)
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        requests: SimpleQueue[pb.ActRequest | None] = SimpleQueue()
        stream: Any = PolicyServiceStub(channel).ActStream(iter(requests.get, None))

        def act(step: int) -> int:
            parts = to_parts("observation", learner.observation, np.full(4, step / 10, np.float32))
            requests.put(pb.ActRequest(episode_id=episode.episode_id, observation=parts, reward=1.0))
            return int(next(stream).step)

        assert act(3) == 3
        terminate(server)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        health.cancel()
        assert [act(step) for step in range(4, 11)] == list(range(4, 11))
        requests.put(None)
        code, _ = server.wait()
    assert code == EXIT_OK
    learner.read()
    slots = {fragment.header.slots[0]: fragment.header.steps for fragment in learner.fragments}
    assert slots == {Slot(0, 1, 0): 4, Slot(0, 1, 4): 4, Slot(0, 1, 8): 2}
    learner.log.close()


def test_a_server_continues_with_the_last_weights_after_its_run(
    redis_server: RedisServer, broker: BrokerProcess, tmp_path: Path
) -> None:
    learner = ScriptedLearner(redis_server.url, Plan(environment={"id": "CartPole-v1", "count": 1}))
    version = learner.publish().version
    with harness.server(tmp_path, broker=broker.address) as server:
        with PolicyClient(server.address, deadline_s=60.0) as client:
            eventually(lambda: client.describe().versions, "weights")
            episode = client.start_episode("a")
            for step in range(5):
                episode.act(np.full(4, step / 10, np.float32), reward=1.0 if step else None)
            with grpc.insecure_channel(broker.address) as channel:
                ControlServiceStub(channel).Stop(ControlRequest(reason="a test"), timeout=20)
            eventually(lambda: "the run has ended" in server.log.read_text(), "the end of the run")
            assert client.act(np.zeros(4, np.float32)).version == version
            assert episode.act(np.zeros(4, np.float32), reward=1.0).step == 5
        terminate(server)
        code, _ = server.wait()
    assert code == EXIT_OK
    learner.log.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A run that learns only from clients, in batches larger than what any of them sends here."""
    address = f"unix:{tmp_path}/serve.sock"
    started = Training(
        tmp_path / "run", "CartPole-v1", "--actors", "0", "--serve", address, "--total-steps", "100000000",
        "--set", "learner.stop_at_target=false", "--set", "learner.stall_timeout_s=600",
    )  # fmt: skip
    yield started
    started.process.kill()
    started.process.communicate()
    wait_until_gone(started)


def flushed(training: Training) -> dict[str, Any]:
    """The answer of `penstock control flush`."""
    command = penstock("control", "flush", str(training.run_dir), "--min-steps", "1", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def serves(training: Training) -> bool:
    endpoints = training.run_dir / "endpoints.json"
    found = json.loads(endpoints.read_text()) if endpoints.exists() else {}
    return any(one["role"] == "server" for one in found.values())


def test_a_flush_takes_the_steps_of_an_episode_that_continues(training: Training, tmp_path: Path) -> None:
    training.until(lambda: serves(training))
    with PolicyClient(f"unix:{tmp_path}/serve.sock", deadline_s=60) as client:
        observation = np.zeros(4, np.float32)
        # What the fallback answers before the first weights arrive is no experience.
        early = client.start_episode("bob", learned=False)
        training.until(lambda: not early.act(observation).fallback)
        episode = client.start_episode("ada")
        for step in range(PLAYED):
            episode.act(observation, reward=1.0 if step else None)
        first = flushed(training)
        for _ in range(PLAYED):
            episode.act(observation, reward=1.0)
        second = flushed(training)
    assert (first["state"], int(first["steps"])) == ("COMMAND_STATE_DONE", PLAYED - 1), first
    assert (second["state"], int(second["steps"])) == ("COMMAND_STATE_DONE", PLAYED), second
    training.process.terminate()
    training.end()
    summary = training.summary()
    assert summary["ledger"]["balanced"]
    assert (summary["updates"], summary["env_steps"]) == (2, 2 * PLAYED - 1)
