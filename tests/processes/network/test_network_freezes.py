"""A broker or a Redis that stands still for a while: deadlines fire, nothing hangs, nothing is lost."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.actor.link import broker_client
from penstock.runtime import metrics
from tests.support.network.network_run import PATIENCE_S, NetworkRun, network_run, without_keepalive
from tests.support.run.harness import eventually
from tests.support.storage.redis_server import RedisServer

ACTORS = 4
SESSION_TIMEOUT_MS = 300_000


def pid_of(run: NetworkRun, who: str) -> int:
    return run.broker.process.pid if who == "broker" else run.server.pid


def noticed(who: str) -> Callable[[], float]:
    """What grows when actors notice: calls that failed, or refusals while the broker waits for Redis."""
    if who == "broker":
        return lambda: float(metrics.RECONNECTS._value.get())
    return lambda: float(metrics.REFUSALS.labels("full")._value.get())


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
def test_a_frozen_process_delays_and_loses_nothing(
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
    with network_run(redis_server, tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as run:
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
    before = count()
    os.kill(pid_of(run, who), signal.SIGSTOP)
    try:
        threading.Event().wait(seconds)
        eventually(lambda: count() >= before + ACTORS, "the deadlines", PATIENCE_S)
    finally:
        os.kill(pid_of(run, who), signal.SIGCONT)
