"""Brokers that are killed or replaced under load, callers that hang up: the log stays exact."""

import os
import random
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Self

import grpc
import pytest

from penstock.broker.log.learner_log import LearnerLog
from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from penstock.v1 import experience_pb2 as experience
from tests.support.experience.fragment_messages import to_proto
from tests.support.network.network_run import MOST_ENTRIES, PATIENCE_S, Reader
from tests.support.network.proxy import Proxy
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, eventually, launch, open_run
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import CHARGE, fragment
from tests.support.storage.redis_server import RedisServer

FIRED, FRAGMENTS = 8, 25


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
                pause.wait(0.05)
        return actor.session


@pytest.mark.promise("killed-brokers-callers-hang")
def test_a_killed_broker_under_load_loses_and_doubles_nothing(redis_url: str, tmp_path: Path) -> None:
    log = open_run(redis_url, budget=4 * CHARGE)
    learner = Learner(log)
    listen = f"unix:{tmp_path}/broker.sock"
    learner.start()
    with (
        harness.broker(redis_url, tmp_path / "first", listen=listen) as first,
        ThreadPoolExecutor(FIRED) as pool,
    ):
        working = [pool.submit(work, listen, f"a-{index}") for index in range(FIRED)]
        eventually(
            lambda: len(learner.read) >= FIRED * FRAGMENTS // 2 or all(each.done() for each in working),
            "half of the work",
            300,
        )
        first.end()
        second = launch(redis_url, tmp_path / "second", listen=listen)
        sessions = [each.result(timeout=300) for each in working]
    learner.end()
    second.end()
    assert Counter(learner.read) == Counter(
        (session, sequence) for session in sessions for sequence in range(1, FRAGMENTS + 1)
    )
    assert log.acked() == FIRED * FRAGMENTS
    log.close()


@pytest.mark.promise("killed-brokers-callers-hang")
def test_callers_that_hang_up_leave_an_exact_log(redis_url: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    log = open_run(redis_url, budget=1000 * CHARGE)
    with harness.broker(redis_url, tmp_path) as broker, SimulatedActor(broker.address, "a-1") as actor:
        actor.open()
        for sequence in range(1, 201):
            message = to_proto(fragment(actor.session, sequence))
            request = experience.AppendRequest(session=actor.session, fragments=[message])
            call = actor.experience.Append.future(request, timeout=5)
            threading.Event().wait(rng.uniform(0, 0.002))
            call.cancel()
            assert actor.send(fragment(actor.session, sequence)).acked_through == sequence
        assert broker.get("/readyz")[0] == 200
    entries = log.read(0, 1000, 0)
    assert [entry.header.sequence for entry in entries if entry.header] == list(range(1, 201))
    assert all(payload is not None for payload in log.fetch([entry.number for entry in entries]))
    log.close()


ACTORS = 6
RATE = 20
"""Fragments per second of one actor."""
BETWEEN = 20
"""Fragments taken before the next broker is replaced."""


class Balancer:
    """What a Service does in Kubernetes: new connections go to brokers that are ready.

    Old ones are left alone.
    """

    def __init__(self, proxy: Proxy, brokers: list[BrokerProcess]) -> None:
        self._proxy, self.brokers = proxy, brokers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        turn = 0
        while not self._over.wait(0.02):
            turn += 1
            ready = [address for broker in list(self.brokers) if (address := ready_address(broker))]
            if ready:
                self._proxy.upstream = ready[turn % len(ready)]


def ready_address(broker: BrokerProcess) -> str:
    """Where it serves, if its readiness probe is green; "" also for one that ends while it is asked."""
    endpoint = read_endpoint(broker.endpoint_file)
    if endpoint is None:
        return ""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/readyz", timeout=5):
            return endpoint.address
    except (OSError, HTTPException):
        return ""


@contextmanager
def actors(address: str, folder: Path) -> Iterator[BrokerProcess]:
    endpoint_file, log = folder / "actors.json", folder / "actors.log"
    command = [sys.executable, "-m", "tests.support.fleet.crowd_actor", "--broker", address]
    command += ["--actor-id", "a", "--count", str(ACTORS), "--rate", str(RATE), "--slots", "2"]
    with log.open("wb") as stderr:
        environment = {**os.environ, ENDPOINT_VARIABLE: str(endpoint_file)}
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    started = BrokerProcess(process=process, endpoint_file=endpoint_file, log=log)
    try:
        yield started
    finally:
        started.end()


@dataclass(kw_only=True)
class Brokers:
    """The brokers of one run; `replace` ends the oldest when its successor serves."""

    server: RedisServer
    folder: Path
    stack: ExitStack
    running: list[BrokerProcess] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def add(self) -> None:
        folder = self.folder / f"broker-{len(self.running) + len(self.ended)}"
        settings = {"broker": {"drain_delay_s": 0.5}}
        started = harness.broker(self.server.url, folder, settings=settings)
        self.running.append(self.stack.enter_context(started))

    def replace(self) -> None:
        self.add()
        oldest = self.running[0]
        oldest.process.terminate()
        self.ended.append(oldest.process.wait(PATIENCE_S))
        self.running.remove(oldest)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_rolling_restart_causes_no_error_in_actors(
    redis_server: RedisServer, tmp_path: Path, rounds: int
) -> None:
    with ExitStack() as stack:
        log = open_run(redis_server.url, wait_s=PATIENCE_S, max_log_entries=MOST_ENTRIES)
        stack.callback(log.close)
        brokers = Brokers(server=redis_server, folder=tmp_path, stack=stack)
        brokers.add()
        brokers.add()
        proxy = stack.enter_context(Proxy(brokers.running[0].address))
        stack.enter_context(Balancer(proxy, brokers.running))
        reader = Reader(log)
        reader.start()
        stack.callback(reader.stop)
        acting = stack.enter_context(actors(proxy.address, tmp_path))
        for _ in range(2 * rounds):
            await_more(reader, BETWEEN)
            brokers.replace()
        await_more(reader, BETWEEN)
        assert brokers.ended == [0] * 2 * rounds
        assert acting.metric("penstock_sessions_opened_total") == ACTORS
        assert acting.metric("penstock_fragments_abandoned_total") == 0
        acting.process.terminate()
        assert acting.process.wait(PATIENCE_S) == 0, acting.log.read_text()
        acked = log.acked()
        eventually(lambda: reader.error or len(reader.read) == acked, "the reader", PATIENCE_S)
    assert_in_order(reader)


def await_more(reader: Reader, count: int) -> None:
    wanted = len(reader.read) + count
    eventually(lambda: reader.error or len(reader.read) >= wanted, "experience", PATIENCE_S)


def assert_in_order(reader: Reader) -> None:
    held: dict[int, list[int]] = {}
    for (session, sequence), _ in reader.read:
        held.setdefault(session, []).append(sequence)
    assert len(held) == ACTORS
    for sequences in held.values():
        assert sequences == list(range(1, len(sequences) + 1))
