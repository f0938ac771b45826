"""A network that is slow, thin, silent or breaks, that loses, doubles and reorders messages.

What was acknowledged is there once and in order, and actors recover in their session.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # missing in the stubs

from penstock.actor.link import broker_client
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session, open_session
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason, Refusal
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.runtime import metrics
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.server_frame import SERVER_OPTIONS
from penstock.v1 import experience_pb2 as experience
from tests.support.experience.fragment_messages import to_proto
from tests.support.network.network_run import (
    PATIENCE_S,
    Name,
    NetworkRun,
    append,
    digest,
    network_run,
    own_fragment,
    without_keepalive,
)
from tests.support.run.harness import eventually
from tests.support.run.simulated_actor import DEADLINE_S, SimulatedActor
from tests.support.run.small_run import CHARGE
from tests.support.storage.redis_server import RedisServer

ACTORS = 4
MEGABIT_PER_S = 125_000
LASTING: dict[str, dict[str, Any]] = {
    "200 ms late, +-100": {"delay_s": 0.2, "jitter_s": 0.1},
    "1% resets": {"reset": 0.01},
    "1 Mbit/s": {"bytes_per_s": MEGABIT_PER_S},
}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a second, and no pings.

    A short silence exceeds them as a long one exceeds the shipped deadlines.
    """
    monkeypatch.setattr(broker_client, "APPEND_DEADLINE_S", 1.0)
    monkeypatch.setattr(broker_client, "CALL_DEADLINE_S", 1.0)
    without_keepalive(monkeypatch)


def assert_recovered(run: NetworkRun) -> None:
    """Experience of every actor flows again, and in the session of before.

    Nothing that was generated is given up.
    """
    reached = {sender: sender.acknowledged for sender in run.senders}
    for sender in run.senders:
        eventually(
            lambda s=sender: run.is_sound() and s.acknowledged > reached[s],  # type: ignore[misc]
            f"experience of {sender.name} after the fault",
            PATIENCE_S,
        )
    assert set(run.sessions().values()) == {1}


@pytest.mark.parametrize("fault", LASTING)
@pytest.mark.parametrize("fragments", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_experience_flows_through_a_bad_network(
    redis_server: RedisServer, tmp_path: Path, fault: str, fragments: int
) -> None:
    with network_run(redis_server, tmp_path) as run:
        run.start(ACTORS).grow(ACTORS)
        run.proxy.set(**LASTING[fault])
        run.grow(fragments, f"experience with {fault}")
        while fault == "1% resets" and not run.proxy.resets:
            run.grow(ACTORS, "a reset")
        run.proxy.heal()
        assert_recovered(run)
        assert run.drain() > fragments


@pytest.mark.slow
def test_weights_arrive_over_a_slow_connection(redis_server: RedisServer, tmp_path: Path) -> None:
    blob = bytes(range(256)) * 4096 + b"behind the first chunk"
    with network_run(redis_server, tmp_path, weights=blob) as run:
        run.proxy.set(bytes_per_s=MEGABIT_PER_S)
        line = BrokerClient(run.proxy.address, Credentials())
        session = open_session(line, "a-0", Role.ROLLOUT, Lifecycle("actor"))
        assert session is not None
        session.start()
        eventually(lambda: session.is_over or session.weights, "the weights", PATIENCE_S)
        session.check()
        assert session.weights is not None
        assert session.weights.blob == blob
        session.close(politely=True)
        line.close()


@pytest.mark.usefixtures("hasty")
def test_a_short_silence_is_survived(redis_server: RedisServer, tmp_path: Path) -> None:
    survive_silence(redis_server, tmp_path, 2)


@pytest.mark.slow
def test_a_long_silence_is_survived(redis_server: RedisServer, tmp_path: Path) -> None:
    survive_silence(redis_server, tmp_path, 30)


def survive_silence(server: RedisServer, folder: Path, seconds: float) -> None:
    """A black hole for so long. A session that is silent beyond its time is closed and another one opened."""
    with network_run(server, folder, session_timeout_ms=60_000) as run:
        run.start(ACTORS).grow(10 * ACTORS)
        before = metrics.RECONNECTS._value.get()
        run.proxy.set(blackhole=True)
        threading.Event().wait(seconds)
        eventually(lambda: metrics.RECONNECTS._value.get() >= before + ACTORS, "the deadlines", PATIENCE_S)
        assert run.is_sound()
        run.proxy.heal()
        assert_recovered(run)
        run.drain()


@pytest.mark.usefixtures("hasty")
def test_a_disconnected_actor_keeps_no_more_than_its_outbox(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    outbox = 4
    with network_run(redis_server, tmp_path) as run:
        (sender,) = run.start(1, outbox=outbox).senders
        run.grow(10)
        run.proxy.set(blackhole=True)
        before = metrics.RECONNECTS._value.get()
        eventually(lambda: metrics.RECONNECTS._value.get() > before, "a deadline", PATIENCE_S)
        assert len(sender.sent) - sender.acknowledged <= outbox + 1
        run.proxy.heal()
        assert_recovered(run)
        run.drain()


@pytest.mark.usefixtures("hasty")
def test_a_connection_whose_far_end_is_gone_is_replaced(redis_server: RedisServer, tmp_path: Path) -> None:
    survive_half_open(redis_server, tmp_path)


@pytest.mark.slow
def test_a_connection_whose_far_end_is_gone_is_replaced_by_the_shipped_deadlines(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    survive_half_open(redis_server, tmp_path)


def survive_half_open(server: RedisServer, folder: Path) -> None:
    """Every connection loses its far end; the sessions outlive that."""
    with network_run(server, folder) as run:
        run.start(ACTORS).grow(10 * ACTORS)
        assert run.proxy.half_open() == ACTORS
        assert_recovered(run)
        run.drain()


ACTORS = 4


def noticed(who: str) -> Callable[[], float]:
    """What grows when actors notice: calls that failed, or refusals while the broker waits for Redis."""
    if who == "broker":
        return lambda: float(metrics.RECONNECTS._value.get())
    return lambda: float(metrics.REFUSALS.labels("full")._value.get())


@pytest.mark.promise("killed-brokers-callers-hang")
@pytest.mark.parametrize(
    ("who", "times", "seconds"),
    [
        ("broker", 1, 1),
        # Redis is noticed only after the broker has waited 5 s for it.
        pytest.param("redis", 1, 1, marks=pytest.mark.slow),
        pytest.param("broker", 10, 20, marks=pytest.mark.slow),
        pytest.param("redis", 10, 20, marks=pytest.mark.slow),
    ],
)
def test_a_frozen_process_causes_delay_and_no_loss(
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    who: str,
    times: int,
    seconds: float,
) -> None:
    if times == 1 and who == "broker":
        monkeypatch.setattr(broker_client, "APPEND_DEADLINE_S", 1.0)
        without_keepalive(monkeypatch)
    with network_run(redis_server, tmp_path, session_timeout_ms=300_000) as run:
        run.start(ACTORS).grow(10 * ACTORS)
        for _ in range(times):
            freeze(run, who, seconds)
            run.grow(10 * ACTORS, "experience after the freeze")
        assert set(run.sessions().values()) == {1}
        run.drain()
        eventually(lambda: run.metric("penstock_watchers") == 0, "no held call to be left")
        assert run.metric("penstock_staged_bytes") == 0


def freeze(run: NetworkRun, who: str, seconds: float) -> None:
    count = noticed(who)
    before, pid = count(), run.broker.process.pid if who == "broker" else run.server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(seconds)
        eventually(lambda: count() >= before + ACTORS, "the deadlines", PATIENCE_S)
    finally:
        os.kill(pid, signal.SIGCONT)


LATE_S = 0.15
"""Each way: a handshake that is not over at once is what a busy broker gives."""
SPARE = 1.25
AWAY_S = 4.0
MOST_TRIES = 30
"""Of one actor in the outage; with doubled and jittered delays it takes about ten."""
STEADY_S = 2.0
"""The last part of the outage, in which the first haste is over."""


@contextmanager
def watching(run: NetworkRun, actors: int) -> Iterator[list[Session]]:
    links = [BrokerClient(run.proxy.address, Credentials()) for _ in range(actors)]
    sessions = []
    for number, link in enumerate(links):
        session = open_session(link, f"a-{number}", Role.ROLLOUT, Lifecycle("actor"))
        assert session is not None
        session.start()
        sessions.append(session)
    try:
        await_all(run, actors)
        yield sessions
    finally:
        for session in sessions:
            session.close(politely=False)
        for link in links:
            link.close()


def await_all(run: NetworkRun, actors: int) -> None:
    eventually(lambda: run.metric("penstock_watchers") == actors, "all actors to watch", PATIENCE_S)


@pytest.mark.parametrize("actors", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_actors_reconnect_one_by_one(redis_server: RedisServer, tmp_path: Path, actors: int) -> None:
    with (
        network_run(redis_server, tmp_path, budget=2 * actors * CHARGE, session_timeout_ms=60_000) as run,
        watching(run, actors) as sessions,
    ):
        run.proxy.set(delay_s=LATE_S)
        assert connections_of_a_reset(run, actors) <= SPARE * actors

        tried = metrics.RECONNECTS._value.get()
        run.proxy.set(refuse=True)
        assert run.proxy.reset() == actors
        threading.Event().wait(AWAY_S)
        healed = time.monotonic()
        run.proxy.set(refuse=False)
        steady = sum(healed - STEADY_S < at < healed for at in run.proxy.accepted_s) / STEADY_S
        await_all(run, actors)
        back = [at - healed for at in run.proxy.accepted_s if at > healed]
        # All are back; a connection begun just before may be one of them.
        assert 0 < len(back) <= SPARE * actors
        assert busiest_second(back) <= 2 * steady
        assert metrics.RECONNECTS._value.get() - tried <= MOST_TRIES * actors
        assert not any(session.is_over for session in sessions)


def connections_of_a_reset(run: NetworkRun, actors: int) -> int:
    before = len(run.proxy.accepted_s)
    assert run.proxy.reset() == actors
    eventually(lambda: len(run.proxy.accepted_s) >= before + actors, "new connections", PATIENCE_S)
    await_all(run, actors)
    return len(run.proxy.accepted_s) - before


def busiest_second(times: list[float]) -> int:
    return max(sum(start <= at < start + 1 for at in times) for start in times)


def test_every_channel_option_is_known_to_grpc() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS):
        assert name.encode() in library, name


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [1, pytest.param(250, marks=pytest.mark.slow)])
def test_an_idle_connection_is_kept(redis_server: RedisServer, tmp_path: Path, seconds: float) -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= 2 * allowed_ms
    assert server["grpc.keepalive_permit_without_calls"] == client["grpc.keepalive_permit_without_calls"] == 1
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


@pytest.mark.promise("lost-replies-cost-fragment")
@pytest.mark.parametrize("fragments", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_with_lost_replies_every_fragment_is_stored_once_in_order(
    redis_server: RedisServer, tmp_path: Path, fragments: int
) -> None:
    with network_run(redis_server, tmp_path) as run:
        run.proxy.set(lose_replies=0.3)
        run.start(8, fragments // 8)
        acked = run.finish()
        assert acked == len(run.reader.read) == fragments
        assert set(run.sessions().values()) == {1}
        assert run.proxy.lost_replies >= 0.15 * run.proxy.replies
        assert run.metric("penstock_fragments_repeated_total") >= run.proxy.lost_replies / 10


COPIES = 3
DISTANCE = 8


def arrivals(count: int, rng: random.Random) -> list[int]:
    sent = [sequence for sequence in range(1, count + 1) for _ in range(COPIES)]
    due = {index: index + rng.uniform(-DISTANCE, DISTANCE) * COPIES for index in range(len(sent))}
    return [sent[index] for index in sorted(due, key=lambda index: due[index])]


def model(order: list[int]) -> Counter[str]:
    """What the log must answer: stored, repeated or gap."""
    answers: Counter[str] = Counter()
    stored = 0
    for sequence in order:
        answers["stored" if sequence == stored + 1 else "repeated" if sequence <= stored else "gap"] += 1
        stored += sequence == stored + 1
    return answers


@pytest.mark.parametrize(
    ("count", "at_once"),
    [
        (150, 1),
        pytest.param(2_000, 1, marks=pytest.mark.slow),
        pytest.param(2_000, 16, marks=pytest.mark.slow),
    ],
)
def test_repeated_and_reordered_messages_are_stored_once_in_order(
    redis_server: RedisServer, tmp_path: Path, count: int, at_once: int
) -> None:
    order = arrivals(count, random.Random(count)) + list(range(1, count + 1))
    with (
        network_run(redis_server, tmp_path, budget=2 * count * CHARGE) as run,
        SimulatedActor(run.proxy.address, "a-0") as actor,
    ):
        actor.open()
        answers, acked = send(actor, order, at_once)
        repeated = run.metric("penstock_fragments_repeated_total")
        sent: dict[Name, str] = {
            (actor.session, n): digest(own_fragment(actor.session, n).payload) for n in range(1, count + 1)
        }
        stored = run.reader.log.acked()
        eventually(lambda: run.is_sound() and len(run.reader.read) >= stored, "the reader", PATIENCE_S)
        run.reader.stop()
        assert run.reader.read == sorted(sent.items())[: len(run.reader.read)]
        assert acked == len(run.reader.read) == run.reader.log.acked()
    if at_once == 1:
        expected = model(order)
        assert expected["repeated"] > COPIES
        assert expected["gap"] > COPIES
        assert acked == expected["stored"]
        assert answers["gap"] == expected["gap"]
        assert repeated == expected["repeated"]


def send(actor: SimulatedActor, order: list[int], at_once: int) -> tuple[Counter[str], int]:
    """Send one message per number, so many in flight; refusals by reason, and the last acknowledged."""
    answers: Counter[str] = Counter()
    acked = 0
    for start in range(0, len(order), at_once):
        calls = []
        for sequence in order[start : start + at_once]:
            message = to_proto(own_fragment(actor.session, sequence))
            request = experience.AppendRequest(session=actor.session, fragments=[message])
            calls.append(actor.experience.Append.future(request, timeout=DEADLINE_S))
        for call in calls:
            reply = call.result()
            refusal = Refusal.from_proto(reply.refusal)
            assert refusal is None or refusal.reason is Reason.GAP, refusal
            answers["taken" if refusal is None else "gap"] += 1
            acked = max(acked, reply.acked_through)
    return answers, acked
