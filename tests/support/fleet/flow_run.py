"""A fleet whose learner is as slow as a test says, watched from outside: metrics, memory, Redis."""

import http.client
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import redis
from prometheus_client.parser import text_string_to_metric_families

from penstock.broker.log import keys
from penstock.protocol.limits import MIB
from tests.support.fleet.fleet import Fleet, Shape
from tests.support.fleet.soak_report import Report

STEPS, SLOTS = 4, 2
BATCH_FRAGMENTS: Final = 4
WIDE: Final = 1600
"""Floats of an observation that make a fragment weigh 64 KiB."""
_LOOK_S: Final = 0.05
_TELL_S: Final = 10.0


@contextmanager
def flow(folder: Path, *, pace_s: float, shape: Shape) -> "Iterator[Flow]":
    """A fleet that serves and learns, with `pace_s` seconds for an update."""
    pace = folder / "pace"
    folder.mkdir(parents=True, exist_ok=True)
    pace.write_text(str(pace_s))
    options = (*shape.learner_options, "--pace", str(pace), "--observation-floats", str(WIDE))
    made = Shape(
        actors=shape.actors,
        brokers=shape.brokers,
        durability=shape.durability,
        settings=shape.settings,
        learner_options=options,
        actor_options=shape.actor_options,
    )
    with Fleet(folder, made) as fleet:
        fleet.start_all()
        client = redis.Redis.from_url(fleet.redis_url)
        try:
            yield Flow(fleet, pace, client)
        finally:
            client.close()


@dataclass
class Flow:
    """A running fleet; `redis` is the test's own connection."""

    fleet: Fleet
    pace_file: Path
    redis: "redis.Redis"
    _began_s: float = field(default_factory=time.monotonic)
    _told_s: float = 0.0

    def pace(self, seconds: float) -> None:
        """Have every update take so long from now on."""
        temporary = self.pace_file.with_suffix(".next")
        temporary.write_text(str(seconds))
        temporary.replace(self.pace_file)

    def state(self, field: str) -> int:
        """A number of the run's state in Redis."""
        return int(self.redis.hget(keys.STATE, field) or 0)

    def info(self, section: str) -> dict[str, Any]:
        """INFO of Redis."""
        return dict(self.redis.info(section))

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """A sample of a process's /metrics."""
        return _sample(self._exposition(name), metric, **labels)

    def share_above(self, name: str, histogram: str, bound: float) -> float:
        """The share of a histogram's observations above one of its bounds, all of one moment."""
        text = self._exposition(name)
        total = _sample(text, f"{histogram}_count")
        within = _sample(text, f"{histogram}_bucket", le=str(float(bound)))
        return 1 - within / total if total else 0.0

    def settle_over(self, fragments: int, what: str) -> None:
        """Wait until the learner has settled so many more entries."""
        goal = self.state("settled") + fragments
        self.fleet.wait(lambda: self.state("settled") >= goal, what)

    def tell(self) -> None:
        """Print how far it is, every ten seconds; in between do nothing."""
        now_s = time.monotonic()
        if now_s < self._told_s + _TELL_S:
            return
        self._told_s = now_s
        data = int(self.info("memory")["used_memory"])
        sys.stdout.write(
            f"{now_s - self._began_s:6.0f} s: {self.state('acked'):,} fragments acknowledged, "
            f"{self.state('settled'):,} settled, {data / MIB:.1f} MiB in Redis\n"
        )
        sys.stdout.flush()

    def finish(self, report: Report) -> None:
        """The end of the fleet; the books must balance."""
        report.audit("at the end", self.fleet.finish())

    def _exposition(self, name: str) -> str:
        process = self.fleet.members[name].process
        endpoint = process.endpoint() if process is not None else None
        assert endpoint is not None, f"{name} does not run"
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.metrics_port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()


class Ceiling:
    """The most memory of processes, and of Redis's data, while it watches."""

    def __init__(self, run: Flow, *names: str) -> None:
        self._run, self._names = run, names
        self.most: dict[str, int] = dict.fromkeys(names, 0)
        self.most_data = 0
        self.rises: dict[str, int] = {}

    def watch(self, seconds: float) -> Self:
        """Look for so long. `rises`: by how much the second half's peak lies above the first half's."""
        halves = []
        for _ in range(2):
            until, peak = time.monotonic() + seconds / 2, dict.fromkeys(self._names, 0)
            while time.monotonic() < until:
                self._run.fleet.check()
                self._run.tell()
                for name in self._names:
                    peak[name] = max(peak[name], resident_bytes(self._run.fleet.pid(name)))
                self.most_data = max(self.most_data, int(self._run.info("memory")["used_memory"]))
                time.sleep(_LOOK_S)
            halves.append(peak)
        first, second = halves
        self.most = {name: max(first[name], second[name]) for name in self._names}
        self.rises = {name: second[name] - first[name] for name in self._names}
        return self

    def figures(self) -> dict[str, str]:
        """For a report."""
        each = (
            f"{name} {most / MIB:.0f} ({self.rises[name] / MIB:+.1f})" for name, most in self.most.items()
        )
        return {"most memory, MiB (second half against first)": ", ".join(each)}

    def check(self, *, rise: int) -> None:
        """AssertionError when somebody's memory rose by more than so many bytes."""
        high = {name: f"{by / MIB:.1f} MiB" for name, by in self.rises.items() if by > rise}
        assert not high, f"memory still rises: {high}"


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _sample(exposition: str, metric: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == f"penstock_{metric}" and labels.items() <= sample.labels.items()
    )
