"""Two brokers behind one address are replaced one after the other under load: actors see no error."""

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Self

import pytest

from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from tests.support.network.network_run import MOST_ENTRIES, PATIENCE_S, Reader
from tests.support.network.proxy import Proxy
from tests.support.run.harness import BrokerProcess, eventually, launch, open_run
from tests.support.storage.redis_server import RedisServer

ACTORS = 6
RATE = 20
"""Fragments per second of one actor."""
DELAY_S = 0.5
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


@dataclass(frozen=True, slots=True)
class Actors:
    """A process of simulated rollout workers."""

    process: "subprocess.Popen[bytes]"
    endpoint_file: Path
    log: Path

    def metric(self, name: str) -> float:
        endpoint = read_endpoint(self.endpoint_file)
        assert endpoint is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))
        )


@contextmanager
def actors(address: str, folder: Path) -> Iterator[Actors]:
    endpoint_file, log = folder / "actors.json", folder / "actors.log"
    command = [sys.executable, "-m", "tests.support.fleet.crowd_actor", "--broker", address]
    command += ["--actor-id", "a", "--count", str(ACTORS), "--rate", str(RATE), "--slots", "2"]
    with log.open("wb") as stderr:
        environment = {**os.environ, ENDPOINT_VARIABLE: str(endpoint_file)}
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    try:
        yield Actors(process, endpoint_file, log)
    finally:
        process.kill()
        process.wait(PATIENCE_S)


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
        broker = launch(self.server.url, folder, settings={"broker": {"drain_delay_s": DELAY_S}})
        self.stack.callback(broker.end)
        eventually(broker.is_ready, "readiness", PATIENCE_S)
        self.running.append(broker)

    def replace(self) -> None:
        self.add()
        oldest = self.running[0]
        oldest.process.terminate()
        self.ended.append(oldest.process.wait(PATIENCE_S))
        self.running.remove(oldest)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_rolling_restart_is_no_error_to_actors(
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
