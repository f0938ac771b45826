"""Random histories of actors, learners and a Redis that dies and goes back in time.

Each history is compared with the model in `tests.support.oracles.run_model`.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.hostile_machine import HostileMachine
from tests.support.storage.redis_server import Binary, RedisServer, find_binaries


@pytest.fixture
def server(redis_binary: Binary) -> Iterator[RedisServer]:
    """A server that loses nothing when it is killed.

    It is on a disk whose fsync costs nothing, if there is one.
    """
    memory = Path("/dev/shm")  # noqa: S108 - mkdtemp is private
    folder = Path(tempfile.mkdtemp(prefix="ps-", dir=memory if memory.is_dir() else None))
    server = RedisServer(redis_binary, folder, "--appendfsync", "always")
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def machine(server: RedisServer) -> type[HostileMachine]:
    class Machine(HostileMachine):
        url = server.url
        server_process = server

    return Machine


@pytest.mark.promise("random-histories-actors-learner")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_history_agrees_with_the_model(machine: type[HostileMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples // len(find_binaries()),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_credit_after_two_rewinds_stays_within_one_sessions_limit(
    machine: type[HostileMachine],
) -> None:
    run = machine()
    run.begin()
    run.open_everything()
    try:
        run.lose_appends("b", 1, is_read=False, is_reply_lost=False)
        for _ in range(2):
            run.crash(is_opened=False)
        run.reopen()
        run.watch("a", 0)
        run.lose_appends("b", 1, is_read=False, is_reply_lost=False)
        run.watch("a", 0)
        run.reorder("a", [1, 3, 0, 2], is_reply_lost=False)
        run.lose_appends("c", 1, is_read=False, is_reply_lost=False)
        run.books_and_log_agree()
        run.weights_and_lease_agree()
    finally:
        run.teardown()
