"""More experience than there is room for: three flows, for as many seconds as wanted.

`overload`: actors offer twice what the learner takes. `full_redis`: others fill Redis to `maxmemory`.
`absent_learner`: no learner runs. Each runs a fleet in `folder`, writes its figures and the audit into the
report and raises AssertionError for whatever does not hold. Tests and `make soak` differ in the seconds
alone.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import redis

from penstock.protocol.limits import KIB, MIB
from tests.support.fleet.fleet import Shape
from tests.support.fleet.flow_run import BATCH_FRAGMENTS, Ceiling, Flow, flow
from tests.support.fleet.soak_report import Report

ACTORS: Final = 8
"""In two processes."""

# ---- overload

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


# ---- full Redis

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


# ---- absent learner

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
