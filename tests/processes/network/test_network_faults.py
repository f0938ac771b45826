"""A slow, thin, breaking or silent network.

What was acknowledged is there, actors recover in their session.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.actor.link import broker_client
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import open_session
from penstock.protocol.messages import Role
from penstock.rpc.auth import Credentials
from penstock.runtime import metrics
from penstock.runtime.lifecycle import Lifecycle
from tests.support.network.network_run import PATIENCE_S, NetworkRun, network_run, without_keepalive
from tests.support.run.harness import eventually
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
def test_weights_arrive_over_a_thin_line(redis_server: RedisServer, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("seconds", [2])
def test_a_short_silence_is_survived(redis_server: RedisServer, tmp_path: Path, seconds: float) -> None:
    survive_silence(redis_server, tmp_path, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30])
def test_a_long_silence_is_survived(redis_server: RedisServer, tmp_path: Path, seconds: float) -> None:
    survive_silence(redis_server, tmp_path, seconds)


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
def test_an_actor_that_is_cut_off_keeps_no_more_than_its_outbox(
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
