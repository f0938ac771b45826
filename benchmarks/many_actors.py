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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import redis

from benchmarks.experience_path import PACING, RUN, SLOTS, STEPS, fetch, specification_of
from benchmarks.plain_redis import redis_pid
from benchmarks.rate import Rate, touch
from benchmarks.services import Services, services
from benchmarks.table import Options, Table
from benchmarks.transfer import cpu_seconds
from broker.log import keys
from broker.log.learner_log import LearnerLog
from broker.log.learner_records import Commit
from penstock.wire.limits import KIB, MIB

SIZE: Final = 64 * KIB
PUBLISH_EVERY_S: Final = 0.5
WEIGHTS: Final = bytes(40 * KIB)
"""Bytes of weights, about those of a 64-64 policy."""
READ_COUNT: Final = 64
PATIENCE_S: Final = 120.0

Buckets = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The actors. actors: in `processes` processes. rate: fragments per second of each; None: no limit."""

    actors: int
    rate: float | None
    seconds: float
    processes: int


@dataclass(frozen=True, slots=True)
class Broker:
    """One of several."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a measurement.

    acked: acknowledged to the actors. logged: acknowledged by the log. read: distinct (session, sequence).
    ack_seconds: (bound, fragments acknowledged within it), cumulative. memory in bytes at its peak.
    cpu_seconds: of actors, brokers, Redis and reader, from the release on.
    """

    acked: int
    logged: int
    read: int
    resent: int
    seconds: float
    ack_seconds: Buckets
    broker_memory: int
    cpu_seconds: Mapping[str, float]

    @property
    def lost(self) -> int:
        """Return the number of fragments that were acknowledged to an actor and not read."""
        return max(self.acked, self.logged) - self.read

    def quantile_s(self, q: float) -> float:
        """Return the latency below which a share q of the acks lies, linear within its bucket."""
        wanted, lower, below = q * self.ack_seconds[-1][1], 0.0, 0
        for bound, count in self.ack_seconds:
            if count >= wanted:
                return (
                    lower
                    if bound == float("inf")
                    else lower + (bound - lower) * (wanted - below) / (count - below)
                )
            lower, below = bound, count
        return lower


def table(options: Options) -> Table:
    """Return milliseconds from a fragment built to acknowledged, with many actors at one broker; once."""
    crowd = Crowd(
        actors=options.actors,
        rate=options.rate,
        seconds=options.seconds,
        processes=max(2, (os.cpu_count() or 2) // 2),
    )
    with services(durability="fsync_1s") as here:
        outcome = measure(here, crowd)
    return Table(
        title=f"{crowd.actors} simulated actors × {options.rate:g} fragments/s of 64 KiB at one broker, "
        f"{crowd.seconds:g} s, AOF everysec",
        columns=("fragments/s", "ack p50 ms", "ack p99 ms", "sent again", "lost", "broker memory MiB"),
        rows=[
            (
                outcome.acked / crowd.seconds,
                *(outcome.quantile_s(q) * 1000 for q in (0.5, 0.99)),
                outcome.resent,
                outcome.lost,
                outcome.broker_memory / MIB,
            )
        ],
    )


def measure(here: Services, crowd: Crowd, brokers: Sequence[Broker] = ()) -> Outcome:
    """Release the crowd on the services; raises RuntimeError when a simulator fails.

    brokers: others beside that of the services; the simulators take them in turn.
    """
    fronts = (Broker(here.broker, here.endpoint("broker").pid), *brokers)
    log = LearnerLog.connect(here.redis_url, wait_s=10.0)
    log.acquire(RUN, "bench", 600_000)
    budget = max(2048, 8 * crowd.actors) * STEPS * SLOTS
    log.start(specification_of(SIZE).encode(), replace(PACING, budget=budget, max_log_bytes=1024 * MIB))
    simulators = [
        _start(here, fronts[index % len(fronts)].address, crowd, index) for index in range(crowd.processes)
    ]
    pids = {
        "actors": [simulator.pid for simulator in simulators],
        "brokers": [front.pid for front in fronts],
        "Redis": [redis_pid(here)],
        "reader": [os.getpid()],
    }
    try:
        _await_sessions(here.redis_url, crowd.actors, simulators)
        reader = _Reader(log)
        before = _spent(pids)
        reader.read_for(crowd.seconds)
        spent = {name: seconds - before[name] for name, seconds in _spent(pids).items()}
        for simulator in simulators:
            simulator.terminate()
        while any(simulator.poll() is None for simulator in simulators):
            reader.read_for(0.1)
        reader.read_rest()
        _check(simulators)
        return _outcome(here, crowd, log, reader, spent)
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
        self._position = 0
        self._updates = 0
        self._published_s = 0.0
        self.rate = Rate()
        self.seen: set[tuple[int, int]] = set()

    def read_for(self, seconds: float) -> None:
        """Read arrivals for so many seconds."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if now - self._published_s >= PUBLISH_EVERY_S:
                self._publish(now)
            self._read(50)

    def read_rest(self) -> None:
        """Read until there is no more."""
        while self._read(500):
            pass

    def _publish(self, now: float) -> None:
        self._published_s = now
        self._log.publish(WEIGHTS, update=self._updates, settled=self._position, scalars={})
        self._updates += 1
        commit = Commit(
            checkpoint_id=f"c{self._updates}",
            manifest_sha256="",
            position=self._position,
            trim=self._position,
        )
        self._log.commit(commit)

    def _read(self, block_ms: int) -> int:
        entries = self._log.read(self._position, READ_COUNT, block_ms)
        if not entries:
            return 0
        payloads = [payload for payload in fetch(self._log, entries) if payload]
        for payload in payloads:
            touch(payload)
        self.seen.update((e.header.session, e.header.sequence) for e in entries if e.header is not None)
        self._position = entries[-1].number
        self.rate.add(len(payloads), sum(map(len, payloads)))
        return len(entries)


def _spent(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {name: sum(map(cpu_seconds, each)) for name, each in pids.items()}


def _start(here: Services, broker: str, crowd: Crowd, index: int) -> "subprocess.Popen[bytes]":
    count = crowd.actors // crowd.processes + (index < crowd.actors % crowd.processes)
    command = (
        *(sys.executable, "-m", "benchmarks.simulated_actor", "--broker", broker),
        *("--actor-id", f"sim-{index}", "--count", str(count)),
        *(() if crowd.rate is None else ("--rate", str(crowd.rate))),
        *("--report", str(_report(here.folder, index))),
    )
    with (here.folder / f"sim-{index}.log").open("wb") as stderr:
        return subprocess.Popen(command, stderr=stderr)


def _report(folder: Path, index: int) -> Path:
    return folder / f"sim-{index}.report.json"


def _await_sessions(url: str, count: int, simulators: "Sequence[subprocess.Popen[bytes]]") -> None:
    client = redis.Redis.from_url(url)
    deadline = time.monotonic() + PATIENCE_S
    while (there := int(client.zcard(keys.OPEN))) < count:
        if time.monotonic() > deadline or any(simulator.poll() is not None for simulator in simulators):
            raise RuntimeError(f"{there} of {count} actors have a session after {PATIENCE_S} s")
        time.sleep(0.1)
    client.close()


def _check(simulators: "Sequence[subprocess.Popen[bytes]]") -> None:
    codes = [simulator.returncode for simulator in simulators]
    if any(codes):
        raise RuntimeError(f"simulators ended with {codes}")


def _outcome(
    here: Services, crowd: Crowd, log: LearnerLog, reader: _Reader, spent: Mapping[str, float]
) -> Outcome:
    reports = [json.loads(_report(here.folder, index).read_text()) for index in range(crowd.processes)]
    bounds = [bound for bound, _ in reports[0]["ack_seconds"]]
    counts = [sum(row) for row in zip(*([n for _, n in r["ack_seconds"]] for r in reports), strict=True)]
    return Outcome(
        acked=sum(one["acked"] for one in reports),
        logged=log.acked(),
        read=len(reader.seen),
        resent=sum(one["resent"] for one in reports),
        seconds=crowd.seconds,
        ack_seconds=list(zip(bounds, counts, strict=True)),
        broker_memory=peak_memory(here.endpoint("broker").pid),
        cpu_seconds=spent,
    )


def peak_memory(pid: int) -> int:
    """Return the most bytes that a process has had resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"/proc/{pid}/status says nothing of VmHWM")
