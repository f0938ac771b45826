"""Many actors lose their broker at once.

They come back one by one, each once, and no faster than while it was away.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session, open_session
from penstock.protocol.messages import Role
from penstock.rpc.auth import Credentials
from penstock.runtime import metrics
from penstock.runtime.lifecycle import Lifecycle
from tests.support.network.network_run import PATIENCE_S, NetworkRun, network_run
from tests.support.run.harness import eventually
from tests.support.run.small_run import CHARGE
from tests.support.storage.redis_server import RedisServer

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
    for number, broker_client in enumerate(links):
        session = open_session(broker_client, f"a-{number}", Role.ROLLOUT, Lifecycle("actor"))
        assert session is not None
        session.start()
        sessions.append(session)
    try:
        await_all(run, actors)
        yield sessions
    finally:
        for session in sessions:
            session.close(politely=False)
        for broker_client in links:
            broker_client.close()


def await_all(run: NetworkRun, actors: int) -> None:
    eventually(lambda: run.metric("penstock_watchers") == actors, "all actors to watch", PATIENCE_S)


@pytest.mark.parametrize("actors", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_herd_comes_back_one_by_one(redis_server: RedisServer, tmp_path: Path, actors: int) -> None:
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
