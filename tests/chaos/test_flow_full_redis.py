"""Redis filled to `maxmemory`: experience waits; lease, publish, commit and trim go on; then the flow does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from penstock.wire.limits import KIB, MIB
from tests.chaos.fleet import Shape
from tests.chaos.flow_run import BATCH_FRAGMENTS, Flow, flow

STALENESS = 15
"""A backlog of up to 16 batches, so that the learner has something to learn from meanwhile."""
LEAST = 85 * MIB
"""The lowest `maxmemory` that the broker accepts with these ceilings, to a MiB."""
SETTINGS = (
    f"algorithm.staleness={STALENESS}",
    "learner.lease_ttl_s=2",
    f"broker.max_log_bytes={16 * MIB}",
    f"broker.max_staged_bytes={4 * MIB}",
    f"broker.max_memory_bytes={LEAST + 24 * MIB}",
)
BALLAST = (MIB, 64 * KIB)
"""Sizes of the foreign values, the largest first."""
SURELY_ALL = 20
"""Refusals after which nothing is on its way any more that was staged before."""


@contextmanager
def filled(run: Flow) -> Iterator[None]:
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


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_all_that_frees_memory_goes_on_in_a_full_redis(tmp_path: Path, times: int) -> None:
    """Fragments are refused, publications, commits, trims and renewals are not; nothing is evicted or lost."""
    shape = Shape(actors=1, settings=SETTINGS, actor_options=("--count", "4"))
    with flow(tmp_path, pace_s=0.2, shape=shape) as run:
        for _ in range(times):
            run.fleet.wait(
                lambda: run.state("number") - run.state("settled") >= 12 * BATCH_FRAGMENTS, "a backlog"
            )
            with filled(run):
                _check_progress(run)
            run.settle_over(20 * BATCH_FRAGMENTS, "the flow to go on")
        assert run.info("stats")["evicted_keys"] == 0
        run.finish()


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
