"""Actors that come and go: the broker keeps neither files nor memory of them, Redis no rows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.v1 import experience_pb2 as experience
from tests.support.network.network_run import PATIENCE_S, NetworkRun, append, network_run
from tests.support.run.harness import eventually
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.storage.redis_server import RedisServer

THREADS = 4
NAMES = 10
"""Actor names of one thread; a name that comes again supersedes its session."""
WARM_UP = 200
GROWTH = 1.1


def come_and_go(address: str, thread: int, first: int, count: int) -> None:
    """So many lives: a connection, a session, a fragment; every other one leaves without a word."""
    for number in range(first, first + count):
        with SimulatedActor(address, f"t{thread}-{number % NAMES}") as actor:
            actor.open()
            assert append(actor, 1).acked_through == 1
            if number % 2:
                actor.experience.CloseSession(
                    experience.CloseSessionRequest(session=actor.session), timeout=5
                )


def churn(run: NetworkRun, sessions: int, first: int) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        share = sessions // THREADS
        lives = [pool.submit(come_and_go, run.broker.address, t, first, share) for t in range(THREADS)]
        for life in lives:
            life.result()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sessions", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_sessions_that_come_and_go_leave_nothing_behind(
    redis_server: RedisServer, tmp_path: Path, sessions: int
) -> None:
    with network_run(redis_server, tmp_path) as run:
        churn(run, WARM_UP, 0)
        eventually(lambda: run.broker_files() < 40 + THREADS, "connections to end", PATIENCE_S)
        files, memory = run.broker_files(), run.broker_status("VmRSS")
        churn(run, sessions, WARM_UP)
        eventually(lambda: run.broker_files() <= files + 2, "no file to be left", PATIENCE_S)
        assert run.broker_status("VmRSS") <= memory * GROWTH
        assert run.reader.log.acked() == WARM_UP + sessions
        assert run.open_sessions() <= THREADS * NAMES
