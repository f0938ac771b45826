"""Actors that fetch weights over one slow line from a real broker.

A real publisher is offered new ones all the time. The line is a proxy that carries so many bytes a second to
all actors together. What a wait costs is counted in bytes that the line carried meanwhile, so that a busy
machine changes nothing; seconds are told beside them.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import redis

from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import Session, open_session
from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
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
from tests.support.network.proxy import Proxy
from tests.support.run.harness import eventually, launch, open_run
from tests.support.storage.redis_server import RedisServer

LINE_BYTES_PER_S: Final = 20e6
OFFER_S: Final = 0.05


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
    broker: psutil.Process
    most_versions: int = 0
    most_redis_bytes: int = 0
    most_broker_bytes: int = 0

    def offer_until(self, is_over: threading.Event, policy: Policy) -> None:
        """Offer weights that differ, and look at what is held; the thread of the learner's loop."""
        weights, update = dict(snapshot(policy)), 0
        while not is_over.wait(OFFER_S):
            update += 1
            self.publisher.offer(PendingPublication(settled=0, weights=weights, update=update))
            self.most_versions = max(self.most_versions, int(self.redis.hlen(keys.PUBLICATIONS)))
            used = int(self.redis.info("memory")["used_memory"])
            self.most_redis_bytes = max(self.most_redis_bytes, used)
            self.most_broker_bytes = max(self.most_broker_bytes, self.broker.memory_info().rss)

    def check(self) -> None:
        """Raise what ended a session, if anything did."""
        for actor in self.actors:
            actor.session.check()
            assert actor.session.ended is None, actor.session.ended

    def rises(self) -> int:
        """How often the weights of the actor got newer for whom they did so least often."""
        self.check()
        return min(len(actor.rises) for actor in self.actors)


@contextmanager
def slow_line_run(
    server: RedisServer, folder: Path, *, mib: float, actors: int, fetch_wait_s: float
) -> Iterator[SlowLineRun]:
    with ExitStack() as stack:
        log = stack.enter_context(_closing(open_run(server.url)))
        broker = launch(server.url, folder / "broker")
        stack.callback(broker.end)
        eventually(broker.is_ready, "readiness")
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
        looking = redis.Redis.from_url(server.url)
        run = SlowLineRun(
            actors=following,
            size=size,
            publisher=publisher,
            redis=looking,
            broker=psutil.Process(broker.endpoint.pid),
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


@contextmanager
def _closing(log: LearnerLog) -> Iterator[LearnerLog]:
    try:
        yield log
    finally:
        log.close()
