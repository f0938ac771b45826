"""Many simulated actors at one broker: how long an acknowledgement takes, and that none is lost.

Actors are released together, by the first publication, when all of them have a session. This process is the
learner's side of the log: it reads every fragment, publishes the bytes of a small policy twice a second,
commits and trims. The acknowledgements of the actors, those of the log and the fragments read must agree.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.path import RUN, Shape, fetch, touch
from benchmarks.stand import Options, Services, Table, memory_bytes, services
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Commit
from penstock.protocol.limits import KIB, MIB

PUBLISH_EVERY_S: Final = 0.5
WEIGHTS: Final = bytes(40 * KIB)
"""Bytes of weights, about those of a 64-64 policy."""
PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a measurement.

    acked: acknowledged to the actors. logged: acknowledged by the log. read: distinct (session, sequence).
    ack_seconds: (bound, fragments acknowledged within it), cumulative. broker_memory: bytes at its peak.
    """

    acked: int
    logged: int
    read: int
    resent: int
    ack_seconds: Sequence[tuple[float, int]]
    broker_memory: int

    @property
    def lost(self) -> int:
        """Return the number of fragments that were acknowledged to an actor and not read."""
        return max(self.acked, self.logged) - self.read

    def quantile_s(self, q: float) -> float:
        """Return the latency below which a share q of the acks lies, linear within its bucket."""
        wanted, lower, below = q * self.ack_seconds[-1][1], 0.0, 0
        for bound, count in self.ack_seconds:
            if count >= wanted and bound < float("inf"):
                return lower + (bound - lower) * (wanted - below) / (count - below)
            if count >= wanted:
                break
            lower, below = bound, count
        return lower


def table(options: Options) -> Table:
    """Return milliseconds from a fragment built to acknowledged, with many actors at one broker; once."""
    processes = max(2, (os.cpu_count() or 2) // 2)
    with services(durability="fsync_1s") as here:
        outcome = measure(here, options.actors, options.rate, options.seconds, processes)
    row = (
        outcome.acked / options.seconds,
        *(outcome.quantile_s(q) * 1000 for q in (0.5, 0.99)),
        *(outcome.resent, outcome.lost, outcome.broker_memory / MIB),
    )
    return Table(
        title=f"{options.actors} simulated actors × {options.rate:g} fragments/s of 64 KiB at one broker, "
        f"{options.seconds:g} s, AOF everysec",
        columns=("fragments/s", "ack p50 ms", "ack p99 ms", "sent again", "lost", "broker memory MiB"),
        rows=[row],
    )


def measure(here: Services, actors: int, rate: float, seconds: float, processes: int = 2) -> Outcome:
    """Let so many actors send for so long; raises RuntimeError when a simulator fails.

    rate: fragments per second of each.
    """
    log, shape = LearnerLog.connect(here.redis_url, wait_s=10.0), Shape.of(64 * KIB)
    log.acquire(RUN, "bench", 600_000)
    pacing = replace(shape.pacing(max(2048, 8 * actors)), max_log_bytes=1024 * MIB)
    log.start(shape.specification().encode(), pacing)
    counts = [actors // processes + (index < actors % processes) for index in range(processes)]
    simulators = [_start(here, count, rate, index) for index, count in enumerate(counts)]
    try:
        _await_sessions(log, actors, simulators)
        reader = _Reader(log)
        reader.read_for(seconds)
        for simulator in simulators:
            simulator.terminate()
        while any(simulator.poll() is None for simulator in simulators):
            reader.read_for(0.1)
        reader.read_rest()
        if any(codes := [simulator.returncode for simulator in simulators]):
            raise RuntimeError(f"simulators ended with {codes}")
        return _outcome(here, processes, log.acked(), len(reader.seen))
    finally:
        for simulator in simulators:
            simulator.kill()
            simulator.wait()
        log.release()
        log.close()


class _Reader:
    """The learner's side: reads, publishes, commits. `seen`: (session, sequence) of every entry."""

    def __init__(self, log: LearnerLog) -> None:
        self._log = log
        self._position = self._updates = 0
        self._published_s = 0.0
        self.seen: set[tuple[int, int]] = set()

    def read_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if now - self._published_s >= PUBLISH_EVERY_S:
                self._publish(now)
            self._read(50)

    def read_rest(self) -> None:
        while self._read(500):
            pass

    def _publish(self, now: float) -> None:
        self._published_s = now
        self._log.publish(WEIGHTS, update=self._updates, settled=self._position, scalars={})
        self._updates += 1
        name, position = f"c{self._updates}", self._position
        self._log.commit(Commit(checkpoint_id=name, manifest_sha256="", position=position, trim=position))

    def _read(self, block_ms: int) -> int:
        entries = self._log.read(self._position, 64, block_ms)
        if entries:
            for payload in fetch(self._log, entries):
                touch(payload)
            self.seen.update((e.header.session, e.header.sequence) for e in entries if e.header is not None)
            self._position = entries[-1].number
        return len(entries)


def _start(here: Services, count: int, rate: float, index: int) -> "subprocess.Popen[bytes]":
    command = (
        *(sys.executable, "-m", "tests.support.fleet.crowd_actor", "--broker", here.broker),
        *("--actor-id", f"sim-{index}", "--count", str(count), "--rate", str(rate)),
        *("--report", str(here.folder / f"sim-{index}.report.json")),
    )
    with (here.folder / f"sim-{index}.log").open("wb") as stderr:
        return subprocess.Popen(command, stderr=stderr)


def _await_sessions(log: LearnerLog, count: int, simulators: "Sequence[subprocess.Popen[bytes]]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (there := len(log.status().sessions)) < count:
        if time.monotonic() > deadline or any(simulator.poll() is not None for simulator in simulators):
            raise RuntimeError(f"{there} of {count} actors have a session after {PATIENCE_S} s")
        time.sleep(0.1)


def _outcome(here: Services, processes: int, logged: int, read: int) -> Outcome:
    paths = [here.folder / f"sim-{index}.report.json" for index in range(processes)]
    reports = [json.loads(path.read_text()) for path in paths]
    bounds = [bound for bound, _ in reports[0]["ack_seconds"]]
    counts = [sum(row) for row in zip(*([n for _, n in r["ack_seconds"]] for r in reports), strict=True)]
    return Outcome(
        acked=sum(one["acked"] for one in reports), logged=logged, read=read,
        resent=sum(one["resent"] for one in reports), ack_seconds=list(zip(bounds, counts, strict=True)),
        broker_memory=memory_bytes(here.endpoint("broker").pid),
    )  # fmt: skip
