"""Calls that are given up at random moments.

No reply goes to another call, no connection and no memory is lost.
"""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from penstock.broker.log.connection import MAX_CONNECTIONS
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import weights_pb2 as weights
from tests.support.experience.fragment_messages import to_proto
from tests.support.network.network_run import (
    PATIENCE_S,
    NetworkRun,
    append,
    await_credit,
    digest,
    network_run,
    own_fragment,
)
from tests.support.run.harness import eventually
from tests.support.run.simulated_actor import DEADLINE_S, SimulatedActor
from tests.support.storage.redis_server import RedisServer

CANCELLERS = 3
WARM_UP = 300
LONGEST_S = 0.004
BLOB = bytes(random.Random(0).randbytes(4096))
GROWTH = 1.1
OTHERS = 8
"""Connections beside the broker's pool: its change feed and inspector, the learner's, this test's."""


class Canceller:
    """An actor that gives up most of its calls, of every kind, after up to LONGEST_S."""

    def __init__(self, address: str, number: int) -> None:
        self.actor = SimulatedActor(address, f"c-{number}")
        self.random = random.Random(number)
        self.actor.open()
        self.sequence = self.reports = 0

    def cancel(self, count: int) -> int:
        """Begin and give up so many calls; how many of them had not ended."""
        cancelled = 0
        for _ in range(count):
            call = self._begin()
            threading.Event().wait(self.random.uniform(0, LONGEST_S))
            cancelled += call.cancel()
            assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.OK), call.details()
        return cancelled

    def _begin(self) -> Any:
        actor, session = self.actor, self.actor.session
        kind = self.random.choice(("append", "append", "watch", "weights", "report", "open"))
        if kind == "append":
            return self._append()
        if kind == "watch":
            watch = weights.WatchLatestRequest(session=session, known_version=2**40, wait_ms=1000)
            return actor.weights.WatchLatest.future(watch, timeout=DEADLINE_S)
        if kind == "weights":
            wanted = weights.GetWeightsRequest(session=session, version=1, offset=self.random.randrange(4096))
            return actor.weights.GetWeights.future(wanted, timeout=DEADLINE_S)
        if kind == "report":
            episode = experience.Episode(episode_id=1, episode_return=1.0, length=1, version=1)
            report = experience.ReportEpisodesRequest(session=session, sequence=1, episodes=[episode])
            return actor.experience.ReportEpisodes.future(report, timeout=DEADLINE_S)
        other = experience.OpenSessionRequest(actor_id="opened-and-left", role=experience.ROLE_ROLLOUT)
        return actor.experience.OpenSession.future(other, timeout=DEADLINE_S)

    def _append(self) -> Any:
        """The next fragment; what became of the last one is asked first."""
        session = self.actor.session
        if self.sequence:
            self.settle()
        self.sequence += 1
        await_credit(self.actor, self.sequence)
        message = to_proto(own_fragment(session, self.sequence))
        request = experience.AppendRequest(session=session, fragments=[message])
        return self.actor.experience.Append.future(request, timeout=DEADLINE_S)

    def settle(self) -> None:
        reply = append(self.actor, self.sequence)
        assert reply.acked_through == self.sequence


def verify(run: NetworkRun, over: threading.Event) -> int:
    """Calls whose answers are known, until `over`; how many. A reply that was another call's would show."""
    rng, checked = random.Random(99), 0
    with SimulatedActor(run.broker.address, "verifier") as actor:
        session = actor.open().session
        while not over.is_set():
            offset = rng.randrange(len(BLOB))
            request = weights.GetWeightsRequest(session=session, version=1, offset=offset)
            reply = actor.weights.GetWeights(request, timeout=DEADLINE_S)
            assert (reply.offset, reply.chunk) == (offset, BLOB[offset:])
            checked += 1
            if checked % 10 == 0:
                sequence = checked // 10
                assert append(actor, sequence).acked_through == sequence
    return checked


@pytest.mark.parametrize("cancels", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_calls_that_are_given_up_mix_nothing_and_leak_nothing(
    redis_server: RedisServer, tmp_path: Path, cancels: int
) -> None:
    with (
        network_run(redis_server, tmp_path, weights=BLOB) as run,
        ThreadPoolExecutor(CANCELLERS + 1) as pool,
    ):
        over = threading.Event()
        run.reader.publishes = False  # the version that is verified would be gone
        cancellers = [Canceller(run.broker.address, number) for number in range(CANCELLERS)]
        in_parallel(pool, cancellers, WARM_UP)
        files, memory = quiet_files(run), run.broker_status("VmRSS")
        verifying = pool.submit(verify, run, over)
        cancelled = in_parallel(pool, cancellers, cancels)
        over.set()
        assert verifying.result(PATIENCE_S) > cancels / 100
        assert cancelled > cancels / 4
        for canceller in cancellers:
            canceller.settle()
        eventually(lambda: run.metric("penstock_watchers") == 0, "no held call to be left", PATIENCE_S)
        eventually(lambda: own_files(run) <= files + 2, "no file to be left", PATIENCE_S)
        assert run.broker_status("VmRSS") <= memory * GROWTH
        assert clients(run) <= MAX_CONNECTIONS + OTHERS
        acked = run.reader.log.acked()
        eventually(lambda: run.is_sound() and len(run.reader.read) == acked, "the reader", PATIENCE_S)
        assert_exact(run, cancellers)
        for canceller in cancellers:
            canceller.actor.channel.close()


def in_parallel(pool: ThreadPoolExecutor, cancellers: list[Canceller], cancels: int) -> int:
    """All of them at once; how many calls were given up."""
    share = -(-cancels // len(cancellers))
    begun: list[Callable[[], int]] = [pool.submit(each.cancel, share).result for each in cancellers]
    return sum(result() for result in begun)


def quiet_files(run: NetworkRun) -> int:
    eventually(lambda: run.metric("penstock_watchers") == 0, "no held call to be left", PATIENCE_S)
    return own_files(run)


def own_files(run: NetworkRun) -> int:
    """The broker's open files without its connections to Redis, which are pooled and counted there."""
    return run.broker_files() - clients(run)


def clients(run: NetworkRun) -> int:
    with redis.Redis.from_url(run.server.url) as client:
        return int(client.info("clients")["connected_clients"])


def assert_exact(run: NetworkRun, cancellers: list[Canceller]) -> None:
    for canceller in cancellers:
        session = canceller.actor.session
        held = [(name, sha) for name, sha in run.reader.read if name[0] == session]
        made = range(1, canceller.sequence + 1)
        assert held == [((session, n), digest(own_fragment(session, n).payload)) for n in made]
