"""More experience than there is room for: three flows, and what a soak reports."""

import json
import os
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import redis
from prometheus_client.parser import text_string_to_metric_families

from penstock.broker.log import keys
from penstock.protocol.limits import KIB, MIB
from tests.support.fleet.fleet import Audit, Fleet, Shape


class Report:
    """Filled while the soak runs; whole at any moment.

    figures: what a scenario measured, by name. failure: what ended it before its time; "" when nothing did.
    """

    def __init__(self, *, scenario: str = "", seed: int = 0, minutes: float = 0.0) -> None:
        self._scenario, self._seed, self._minutes = scenario, seed, minutes
        self._began_s = time.monotonic()
        self._fleet: Fleet | None = None
        self._audits: list[dict[str, Any]] = []
        self._weather: Counter[str] = Counter()
        self.figures: dict[str, Any] = {}
        self.failure = "it did not come to its end"

    def follow(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def note_weather(self, name: str) -> None:
        self._weather[name] += 1

    def audit(self, when: str, audit: Audit) -> None:
        """One more; AssertionError when its books do not balance."""
        found = {key: audit.report.get(key) for key in ("clean", "fragments", "journalled", "counters")}
        self._audits.append({"when": when, "exit": audit.code, **found})
        assert audit.code == 0, f"audit {when}: {audit.text}"

    def to_json(self) -> dict[str, Any]:
        fleet = self._fleet
        last = self._audits[-1] if self._audits else {}
        return {
            "scenario": self._scenario,
            "seed": self._seed,
            "minutes": self._minutes,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "failure": self.failure,
            "passed": not self.failure and bool(self._audits),
            "figures": self.figures,
            **(fleet.log.summary() if fleet else {}),
            "network": dict(self._weather),
            "hung": sum(kill.hung for kill in fleet.log.kills) if fleet else 0,
            "freezes": dict(fleet.log.freezes) if fleet else {},
            "restarts": fleet.restarts() if fleet else {},
            "acknowledged": (last.get("counters") or {}).get("acked", 0),
            "audits": self._audits,
            "log": fleet.log.lines() if fleet else [],
        }

    def summary(self) -> str:
        """All but the single kills and audits."""
        found = {key: value for key, value in self.to_json().items() if key not in ("log", "audits")}
        return json.dumps(found, indent=2)


STEPS, SLOTS = 4, 2
BATCH_FRAGMENTS: Final = 4
WIDE: Final = 1600
"""Floats of an observation that make a fragment weigh 64 KiB."""
_LOOK_S: Final = 0.05
_TELL_S: Final = 10.0


@contextmanager
def flow(folder: Path, *, pace_s: float, shape: Shape) -> "Iterator[Flow]":
    pace = folder / "pace"
    folder.mkdir(parents=True, exist_ok=True)
    pace.write_text(str(pace_s))
    options = (*shape.learner_options, "--pace", str(pace), "--observation-floats", str(WIDE))
    with Fleet(folder, replace(shape, learner_options=options)) as fleet:
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
        temporary = self.pace_file.with_suffix(".next")
        temporary.write_text(str(seconds))
        temporary.replace(self.pace_file)

    def state(self, field: str) -> int:
        return int(self.redis.hget(keys.STATE, field) or 0)

    def info(self, section: str) -> dict[str, Any]:
        return dict(self.redis.info(section))

    def metric(self, name: str, metric: str, **labels: str) -> float:
        return _sample(self._exposition(name), metric, **labels)

    def share_above(self, name: str, histogram: str, bound: float) -> float:
        """The share of a histogram's observations above one of its bounds, all of one moment."""
        text = self._exposition(name)
        total = _sample(text, f"{histogram}_count")
        within = _sample(text, f"{histogram}_bucket", le=str(float(bound)))
        return 1 - within / total if total else 0.0

    def settle_over(self, fragments: int, what: str) -> None:
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
        url = f"http://127.0.0.1:{endpoint.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as page:
            return str(page.read().decode())


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
        each = (
            f"{name} {most / MIB:.0f} ({self.rises[name] / MIB:+.1f})" for name, most in self.most.items()
        )
        return {"most memory, MiB (second half against first)": ", ".join(each)}

    def check(self, *, rise: int) -> None:
        """AssertionError when somebody's memory rose by more than so many bytes."""
        high = {name: f"{by / MIB:.1f} MiB" for name, by in self.rises.items() if by > rise}
        assert not high, f"memory still rises: {high}"


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _sample(exposition: str, metric: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == f"penstock_{metric}" and labels.items() <= sample.labels.items()
    )


ACTORS: Final = 8
"""In two processes."""


PACE_S: Final = 0.2
TAKEN_PER_S: Final = BATCH_FRAGMENTS / PACE_S
STALENESS: Final = 3
MAX_LOG, MAX_STAGED = 6 * MIB, 4 * MIB
MAX_MEMORY: Final = MAX_LOG + MAX_STAGED + 81 * MIB
"""The least that broker and learner accept, to a MiB."""
OVERLOAD: Final = Shape(
    actors=2,
    settings=(
        f"broker.max_memory_bytes={MAX_MEMORY}",
        f"broker.max_log_bytes={MAX_LOG}",
        f"broker.max_staged_bytes={MAX_STAGED}",
        f"algorithm.staleness={STALENESS}",
    ),
    actor_options=("--count", str(ACTORS // 2), "--rate", str(2 * TAKEN_PER_S / ACTORS)),
)


def overload(folder: Path, seconds: float, report: Report) -> None:
    """No eviction, no growth, no loss; staleness in its bound.

    And a learner that speeds up is fed at once.
    """
    with flow(folder, pace_s=PACE_S, shape=OVERLOAD) as run:
        run.settle_over(3 * BATCH_FRAGMENTS, "the first updates")
        before = run.state("settled")
        memory = Ceiling(run, "redis", "broker-0", "learner", "actor-0", "actor-1").watch(seconds)

        taken = run.state("settled") - before
        waited = sum(run.metric(f"actor-{n}", "actor_wait_seconds_total") for n in range(2))
        evicted, log_bytes = run.info("stats")["evicted_keys"], run.state("log_bytes")
        too_old = run.share_above("learner", "staleness_updates", STALENESS + 1)
        report.figures |= {
            "fragments a second that the learner took": f"{taken / seconds:.1f}, offered {2 * TAKEN_PER_S:g}",
            "seconds that actors waited": round(waited),
            "keys evicted": evicted,
            "most data in Redis": f"{memory.most_data / MIB:.1f} MiB of {MAX_MEMORY / MIB:g}",
            f"share staler than {STALENESS + 1} updates": f"{too_old:.2%}",
            **memory.figures(),
        }
        assert waited > 0, "no actor had to wait: this was no overload"
        assert taken < 1.5 * TAKEN_PER_S * seconds, f"the learner was not slowed down: {taken} fragments"
        assert evicted == 0, f"{evicted} keys were evicted"
        assert memory.most_data < MAX_MEMORY, f"{memory.most_data} bytes of data in Redis"
        assert log_bytes <= MAX_LOG, f"{log_bytes} bytes in the log, over {MAX_LOG}"
        memory.check(rise=16 * MIB)
        assert too_old <= 0.01, f"{too_old:.2%} staler than {STALENESS + 1} updates"

        run.pace(0.0)
        sped_up_s = time.monotonic()
        run.settle_over(int(4 * TAKEN_PER_S), "a learner that has sped up to be fed")
        fed_per_s = 4 * TAKEN_PER_S / (time.monotonic() - sped_up_s)
        report.figures["fragments a second once it has sped up"] = round(fed_per_s, 1)
        run.finish(report)


LEAST: Final = 101 * MIB
"""The lowest `maxmemory` that the broker accepts with these ceilings, to a MiB."""
FULL: Final = Shape(
    actors=1,
    settings=(
        # up to 16 batches, so that the learner has something to learn from meanwhile
        "algorithm.staleness=15",
        "learner.lease_ttl_s=2",
        f"broker.max_log_bytes={16 * MIB}",
        f"broker.max_staged_bytes={4 * MIB}",
        f"broker.max_memory_bytes={LEAST + 24 * MIB}",
    ),
    actor_options=("--count", "4"),
)
BALLAST: Final = (MIB, 64 * KIB)
"""Sizes of the foreign values, the largest first."""
SURELY_ALL: Final = 20
"""Refusals after which nothing is on its way any more that was staged before."""


def full_redis(folder: Path, seconds: float, report: Report) -> None:
    """Fragments are refused, publications, commits, trims and renewals are not; nothing is evicted or lost.

    Redis is filled and emptied again until the time is up, once at least.
    """
    with flow(folder, pace_s=0.2, shape=FULL) as run:
        until_s, times = time.monotonic() + seconds, 0
        while not times or time.monotonic() < until_s:
            run.fleet.wait(
                lambda: run.state("number") - run.state("settled") >= 12 * BATCH_FRAGMENTS, "a backlog"
            )
            with _filled(run):
                _check_progress(run)
                run.tell()
            run.settle_over(20 * BATCH_FRAGMENTS, "the flow to go on")
            times += 1
            evicted = run.info("stats")["evicted_keys"]
            report.figures |= {"times that Redis was full": times, "keys evicted": evicted}
            assert evicted == 0, f"{evicted} keys were evicted"
        refused = run.metric("broker-0", "refusals_total", reason="full")
        report.figures["fragments that were told to wait"] = round(refused)
        run.finish(report)


@contextmanager
def _filled(run: Flow) -> Iterator[None]:
    """Foreign values take all memory, and then the ceiling sinks by more than the log can give back."""
    ceiling, count = run.info("memory")["maxmemory"], 0
    for size in BALLAST:
        try:
            while True:
                run.redis.set(f"ballast:{count}", bytes(size))
                count += 1
        except redis.exceptions.OutOfMemoryError:
            continue
    run.redis.config_set("maxmemory", LEAST)
    yield
    run.redis.config_set("maxmemory", ceiling)
    run.redis.unlink(*(f"ballast:{index}" for index in range(count)))


def _check_progress(run: Flow) -> None:
    refused = run.metric("broker-0", "refusals_total", reason="full")
    run.fleet.wait(
        lambda: run.metric("broker-0", "refusals_total", reason="full") >= refused + SURELY_ALL,
        "fragments to be refused",
    )
    at = {name: run.state(name) for name in ("acked", "version", "trimmed", "lease_expires_ms")}
    for name, by in (("version", 3), ("trimmed", 1), ("lease_expires_ms", 1)):
        run.fleet.wait(lambda n=name, g=at[name] + by: run.state(n) >= g, f"{name} to move")  # type: ignore[misc]
    assert run.info("memory")["used_memory"] > LEAST, "Redis was not full all the time"
    assert run.state("acked") == at["acked"], "a fragment was taken into a full Redis"


ABSENT: Final = Shape(
    actors=2,
    # Sessions that end sooner than the learner returns: a paused actor must keep its own alive.
    settings=("broker.session_timeout_s=3", "learner.lease_ttl_s=1"),
    actor_options=("--count", str(ACTORS // 2)),
)


def absent_learner(folder: Path, seconds: float, report: Report) -> None:
    """Actors pause, nothing grows, no session ends; the budget bounds what they make; then they catch up."""
    with flow(folder, pace_s=0.01, shape=ABSENT) as run:
        run.settle_over(3 * BATCH_FRAGMENTS, "the first updates")
        run.fleet.wait(lambda: min(_sessions_opened(run)) >= ACTORS // 2, "a session of every actor")
        run.fleet.kill("learner")
        opened = _sessions_opened(run)
        acked = -1
        while acked != (acked := run.state("acked")):
            time.sleep(1.0)

        unlearned = (run.state("number") - run.state("settled")) * run.state("fragment_charge")
        budget = run.state("budget")
        memory = Ceiling(run, "redis", "broker-0", "actor-0", "actor-1").watch(seconds)
        sent = run.state("acked") - acked
        report.figures |= {
            "steps that waited": f"{unlearned} of {budget}",
            "fragments sent meanwhile": sent,
            **memory.figures(),
        }
        assert unlearned <= budget, f"they went on beyond the budget: {unlearned} steps of {budget}"
        assert sent == 0, f"{sent} fragments were sent without credit"
        memory.check(rise=8 * MIB)

        run.fleet.start("learner")
        returned_s = time.monotonic()
        run.settle_over(10 * BATCH_FRAGMENTS, "the learner to catch up")
        report.figures["seconds until it had caught up"] = round(time.monotonic() - returned_s, 1)
        again = _sessions_opened(run)
        assert again == opened, f"sessions opened per process: {opened} before, {again} after"
        run.finish(report)


def _sessions_opened(run: Flow) -> list[float]:
    return [run.metric(f"actor-{n}", "sessions_opened_total") for n in range(2)]


FLOWS: Final[Mapping[str, Callable[[Path, float, Report], None]]] = {
    "overload": overload,
    "full": full_redis,
    "absent": absent_learner,
}
"""By the word that `make soak` knows them by."""
