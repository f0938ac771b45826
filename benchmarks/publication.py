"""Seconds from the learner's publish to weights applied at an actor in another process.

`python -m benchmarks.publication ADDRESS COUNT` is the actor: it watches, loads each publication into a policy
and prints version and time (the machine's monotonic clock, which all processes share).
"""

import statistics
import subprocess
import sys
import time

import numpy as np

from actor.link import Link
from actor.session import Session, Weights, open_session
from benchmarks.experience_path import PACING, RUN, specification_of
from benchmarks.services import services
from benchmarks.table import Options, Table
from broker.learner_log import LearnerLog
from penstock.policy.policy import Policy, build
from penstock.policy.weights import encode, load_into
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.settings import PolicySection
from penstock.wire.auth import Credentials
from penstock.wire.limits import KIB
from penstock.wire.messages import Role
from penstock.wire.spaces import Box, Discrete

PUBLICATIONS = 200
PAUSE_S = 0.02
"""Between publications, about an update of a small policy."""


def table(options: Options) -> Table:
    """Milliseconds from publish to applied."""
    with services(durability="fsync_1s") as here:
        seconds = measure(here.redis_url, here.broker, count=PUBLICATIONS * options.repeat)
    cuts = [value * 1000 for value in statistics.quantiles(seconds, n=100)]
    return Table(
        title="weights of a 64-64 policy, from publish to applied in an actor",
        columns=("publications applied", "p50 ms", "p99 ms"),
        rows=[(len(seconds), cuts[49], cuts[98])],
    )


def policy() -> Policy:
    """The default policy of CartPole-v1."""
    box = Box(np.full(4, -1, np.float32), np.full(4, 1, np.float32))
    return build(box, Discrete(2), PolicySection(), seed=0)


def measure(redis_url: str, broker: str, *, count: int) -> list[float]:
    """Seconds of each of `count` publications that the actor applied (one may skip to the next)."""
    log = LearnerLog.connect(redis_url, wait_s=10.0)
    log.acquire(RUN, "bench", 60_000)
    log.start(specification_of(64 * KIB).encode(), PACING)
    blob = encode(policy())
    published = {log.publish(blob, update=0, settled=0, scalars={}).version: time.monotonic()}
    command = [sys.executable, "-m", __spec__.name, broker, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        first = int(watcher.stdout.readline().split()[0])
        for update in range(1, count + 1):
            started_s = time.monotonic()
            publication = log.publish(blob, update=update, settled=0, scalars={})
            published[publication.version] = started_s
            time.sleep(PAUSE_S)
        applied = [line.split() for line in watcher.stdout]
    log.release()
    log.close()
    return [float(at) - published[int(version)] for version, at in applied if int(version) != first]


def watch(address: str, count: int) -> None:
    """Apply publications until that of update `count`, print each."""
    lifecycle = Lifecycle("bench")
    link, target = Link(address, Credentials()), policy()
    session = open_session(link, "bench-watcher", Role.ROLLOUT, lifecycle)
    if session is None:
        raise RuntimeError(f"{address} opens no session")
    session.start()
    version = update = 0
    while update < count:
        weights = await_weights(session, version)
        load_into(target, weights.blob)
        version, update = weights.publication.version, weights.publication.update
        print(version, time.monotonic(), flush=True)
    session.close(politely=True)
    link.close()


def await_weights(session: Session, version: int) -> Weights:
    """The first weights newer than `version`."""
    with session.changed:
        session.changed.wait_for(
            lambda: session.is_over or (session.weights and session.weights.publication.version > version)
        )
    session.check()
    if session.weights is None:
        raise RuntimeError(str(session.ended))
    return session.weights


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
