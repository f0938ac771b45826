"""Calls that are given up, actors that come and go, and large weights over one slow line.

No reply goes to another call, nothing is left behind, and each actor's weights get newer.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
import redis

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session, open_session
from penstock.broker.log import keys
from penstock.broker.log.connection import MAX_CONNECTIONS
from penstock.broker.log.script import MOST_FETCHED
from penstock.config.settings import LearnerSection, PolicySection
from penstock.learner.lease import LeaseKeeper
from penstock.learner.probe import Quarantine, make_probe
from penstock.learner.publish.publisher import PendingPublication, Publisher, PublishInterval
from penstock.policy.policy import Policy, build
from penstock.policy.weights import snapshot
from penstock.protocol.limits import MIB
from penstock.protocol.messages import Role
from penstock.protocol.spaces import Box, Discrete
from penstock.rpc.auth import Credentials
from penstock.runtime.lifecycle import Lifecycle
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
from tests.support.network.proxy import Proxy
from tests.support.run import harness
from tests.support.run.harness import eventually, open_run
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
        """The next fragment, after the outcome of the one before."""
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
def test_cancelled_calls_mix_and_leak_nothing(
    redis_server: RedisServer, tmp_path: Path, cancels: int
) -> None:
    with network_run(redis_server, tmp_path, weights=BLOB) as run, ThreadPoolExecutor(CANCELLERS + 1) as pool:
        over = threading.Event()
        run.reader.publishes = False  # the version that is verified would be gone
        cancellers = [Canceller(run.broker.address, number) for number in range(CANCELLERS)]
        in_parallel(pool, cancellers, WARM_UP)
        eventually(lambda: run.metric("penstock_watchers") == 0, "no held call to be left", PATIENCE_S)
        files, memory = own_files(run), run.broker_status("VmRSS")
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


THREADS = 4
NAMES = 10
"""Actor names of one thread; a name that comes again supersedes its session."""


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
def test_opened_and_closed_sessions_leave_nothing(
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


LINE_BYTES_PER_S: Final = 20e6


def policy_of(mib: float) -> Policy:
    """A policy whose weights have about so many MiB: two networks of two layers."""
    width = round((mib * MIB / 8) ** 0.5)
    box = Box(np.full(4, -1, np.float32), np.full(4, 1, np.float32))
    return build(box, Discrete(2), PolicySection(hidden_sizes=(width, width)), seed=0)


@dataclass
class FollowingActor:
    """An actor's session, and when its weights got newer: seconds, and bytes that the line had carried."""

    session: Session
    proxy: Proxy
    rises: list[tuple[float, int]] = field(default_factory=list)
    _version: int = 0

    def note(self) -> None:
        weights = self.session.weights
        if weights is not None and weights.publication.version > self._version:
            self._version = weights.publication.version
            self.rises.append((time.monotonic(), self.proxy.bytes_forwarded))

    def longest(self) -> tuple[float, int]:
        """The longest wait between two rises, and until now: seconds and bytes."""
        ends = [*self.rises, (time.monotonic(), self.proxy.bytes_forwarded)]
        waits = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)]
        return max(seconds for seconds, _ in waits), max(size for _, size in waits)


@dataclass(kw_only=True)
class SlowLineRun:
    """A run whose publisher is offered weights all the time."""

    actors: list[FollowingActor]
    size: int
    publisher: Publisher
    redis: "redis.Redis"
    most_versions: int = 0

    def offer_until(self, is_over: threading.Event, policy: Policy) -> None:
        """Offer weights that differ, and look at what is held; the thread of the learner's loop."""
        weights, update = dict(snapshot(policy)), 0
        while not is_over.wait(0.05):
            update += 1
            self.publisher.offer(PendingPublication(settled=0, weights=weights, update=update))
            self.most_versions = max(self.most_versions, int(self.redis.hlen(keys.PUBLICATIONS)))

    def check(self) -> None:
        """Raise what ended a session, if anything did."""
        for actor in self.actors:
            actor.session.check()
            assert actor.session.ended is None, actor.session.ended

    def rises(self) -> int:
        """The number of new weights of the actor that got the fewest."""
        self.check()
        return min(len(actor.rises) for actor in self.actors)


@contextmanager
def slow_line_run(
    server: RedisServer, folder: Path, *, mib: float, actors: int, fetch_wait_s: float
) -> Iterator[SlowLineRun]:
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_run(server.url)))
        broker = stack.enter_context(harness.broker(server.url, folder / "broker"))
        proxy = stack.enter_context(Proxy(broker.address))
        proxy.set(line_bytes_per_s=LINE_BYTES_PER_S)
        policy, over = policy_of(mib), threading.Event()
        box = Box(np.full(4, -1, np.float32), np.full(4, 1, np.float32))
        quarantine = Quarantine(make_probe(box, policy, 0), policy_of(mib), 1e-3)
        lease = LeaseKeeper(
            log, 15.0, stop=over, quarantine=quarantine, on_reopened=over.set, description=str
        )
        interval = PublishInterval(LearnerSection(publish_fetch_wait_s=fetch_wait_s), log.fetched_versions)
        publisher = Publisher(log, lease, quarantine, lambda _: None, interval, over)
        size = sum(array.nbytes for array in snapshot(policy).values())
        lifecycle, following = Lifecycle("actor"), []
        for index in range(actors):
            client = BrokerClient(proxy.address, Credentials())
            stack.callback(client.close)
            session = open_session(client, f"actor-{index}", Role.ROLLOUT, lifecycle)
            assert session is not None
            stack.callback(session.close, politely=False)
            following.append(FollowingActor(session, proxy))
            session.on_change(following[-1].note)
        run = SlowLineRun(
            actors=following, size=size, publisher=publisher, redis=redis.Redis.from_url(server.url)
        )
        threads = [
            threading.Thread(target=lease.run),
            threading.Thread(target=publisher.run),
            threading.Thread(target=run.offer_until, args=(over, policy)),
        ]
        for thread in threads:
            thread.start()
        for actor in following:
            actor.session.start()
        try:
            yield run
        finally:
            over.set()
            publisher.wake()
            for thread in threads:
                thread.join()


def assert_all_rise(run: SlowLineRun) -> None:
    """No actor waits for longer; no more versions are held than may be."""
    fair = run.size * len(run.actors)
    waits = [actor.longest() for actor in run.actors]
    print(
        f"{run.size / MIB:.1f} MiB, {len(run.actors)} actors, {run.publisher.count} publications: rises "
        f"{[len(actor.rises) for actor in run.actors]}, longest wait "
        f"{max(seconds for seconds, _ in waits):.1f} s and {max(size for _, size in waits) / fair:.2f} of "
        f"{fair / LINE_BYTES_PER_S:.1f} s, versions {run.most_versions}"
    )
    assert max(size for _, size in waits) <= 1.5 * fair
    assert run.most_versions <= MOST_FETCHED + 2


@pytest.mark.promise("line-20-mb-s")
@pytest.mark.parametrize("fetch_wait_s", [0.0, 1000.0])
def test_each_actor_gets_newer_weights_over_a_slow_connection(
    redis_server: RedisServer, tmp_path: Path, fetch_wait_s: float
) -> None:
    with slow_line_run(redis_server, tmp_path, mib=2.5, actors=4, fetch_wait_s=fetch_wait_s) as run:
        eventually(lambda: run.rises() >= 6, "six newer versions at each actor", 120.0)
        assert_all_rise(run)
        assert run.most_versions <= 2 or not fetch_wait_s


@pytest.mark.promise("line-20-mb-s")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mib", [7, 25, 100])
def test_weights_of_any_size_arrive_for_minutes(
    redis_server: RedisServer, tmp_path: Path, mib: float
) -> None:
    with slow_line_run(redis_server, tmp_path, mib=mib, actors=8, fetch_wait_s=1.0) as run:
        ends_s = time.monotonic() + 200.0
        while time.monotonic() < ends_s:
            run.check()
            threading.Event().wait(1.0)
        assert_all_rise(run)
