"""Actors, a learner and a broker that is killed, callers that hang up: the log stays exact."""

import os
import random
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from penstock.broker.log.learner_log import LearnerLog
from penstock.protocol.refusal import Reason
from penstock.v1 import experience_pb2 as experience
from tests.support.experience.fragment_messages import to_proto
from tests.support.run.harness import eventually, launch, open_run
from tests.support.run.simulated_actor import SimulatedActor, refusal_of
from tests.support.run.small_run import CHARGE, fragment
from tests.support.storage.redis_server import RedisServer

ACTORS, FRAGMENTS = 8, 25
RETRY_S = 0.05
PATIENCE_S = 300


class Learner(threading.Thread):
    """Reads the log oldest first, settles what it read and publishes after every batch."""

    def __init__(self, log: LearnerLog) -> None:
        super().__init__(daemon=True)
        self.log = log
        self.read: list[tuple[int, int]] = []
        self._over = threading.Event()

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        entries, over = self._look(), False
        while entries or not over:
            over = self._over.is_set()
            entries = self._look()

    def _look(self) -> int:
        """Take what is next, at most 16; returns how many entries there were."""
        entries = self.log.read(len(self.read), 16, 200)
        self.read += [(entry.header.session, entry.header.sequence) for entry in entries if entry.header]
        if entries:
            self.log.publish(b"w", update=len(self.read), settled=entries[-1].number, scalars={})
        return len(entries)


def work(address: str, name: str) -> int:
    """Generate FRAGMENTS fragments, each only with credit; send again until acknowledged.

    Returns the session.
    """
    pause = threading.Event()
    with SimulatedActor(address, name) as actor:
        while actor.acked_through < FRAGMENTS:
            try:
                if not actor.session:
                    actor.open()
                elif actor.acked_through < actor.begin_through:
                    actor.send(fragment(actor.session, actor.acked_through + 1))
                else:
                    actor.watch(wait_ms=1000, known_version=2**40, known_begin_through=actor.begin_through)
            except grpc.RpcError:
                pause.wait(RETRY_S)
        return actor.session


@pytest.mark.promise("killed-brokers-callers-hang")
def test_a_killed_broker_under_load_loses_and_doubles_nothing(redis_url: str, tmp_path: Path) -> None:
    log = open_run(redis_url, budget=4 * CHARGE)
    learner = Learner(log)
    listen = f"unix:{tmp_path}/broker.sock"
    first = launch(redis_url, tmp_path / "first", listen=listen)
    eventually(first.is_ready, "readiness")
    learner.start()
    with ThreadPoolExecutor(ACTORS) as pool:
        working = [pool.submit(work, listen, f"a-{index}") for index in range(ACTORS)]
        eventually(
            lambda: len(learner.read) >= ACTORS * FRAGMENTS // 2 or all(each.done() for each in working),
            "half of the work",
            PATIENCE_S,
        )
        first.end()
        second = launch(redis_url, tmp_path / "second", listen=listen)
        sessions = [each.result(timeout=PATIENCE_S) for each in working]
    learner.end()
    second.end()
    assert Counter(learner.read) == Counter(
        (session, sequence) for session in sessions for sequence in range(1, FRAGMENTS + 1)
    )
    assert log.acked() == ACTORS * FRAGMENTS
    log.close()


@pytest.mark.promise("killed-brokers-callers-hang")
def test_callers_that_hang_up_leave_an_exact_log(redis_url: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    log = open_run(redis_url, budget=1000 * CHARGE)
    broker = launch(redis_url, tmp_path)
    eventually(broker.is_ready, "readiness")
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        for sequence in range(1, 201):
            message = to_proto(fragment(actor.session, sequence))
            request = experience.AppendRequest(session=actor.session, fragments=[message])
            call = actor.experience.Append.future(request, timeout=5)
            threading.Event().wait(rng.uniform(0, 0.002))
            call.cancel()
            assert actor.send(fragment(actor.session, sequence)).acked_through == sequence
    assert broker.get("/readyz")[0] == 200
    broker.end()
    entries = log.read(0, 1000, 0)
    assert [entry.header.sequence for entry in entries if entry.header] == list(range(1, 201))
    assert all(payload is not None for payload in log.fetch([entry.number for entry in entries]))
    log.close()


@pytest.mark.promise("killed-brokers-callers-hang")
@pytest.mark.slow
def test_a_frozen_redis_delays_and_loses_nothing(redis_server: RedisServer, tmp_path: Path) -> None:
    log = open_run(redis_server.url)
    broker = launch(redis_server.url, tmp_path)
    eventually(broker.is_ready, "readiness")
    with SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        assert actor.send(fragment(actor.session, 1)).acked_through == 1
        os.kill(redis_server.pid, signal.SIGSTOP)
        refusal = refusal_of(actor.send(fragment(actor.session, 2)))
        os.kill(redis_server.pid, signal.SIGCONT)
        assert refusal.reason is Reason.FULL
        eventually(lambda: not actor.send(fragment(actor.session, 2)).refusal.reason, "the ack")
    broker.end()
    assert log.acked() == 2
    assert log.residue(0).entries == 2
    log.close()
