"""Redis filled to `maxmemory`: experience waits; lease, publish, commit and trim go on; then the flow does."""

import threading
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
SETTINGS = (
    f"algorithm.staleness={STALENESS}",
    "learner.lease_ttl_s=2",
    f"broker.max_log_bytes={16 * MIB}",
    f"broker.max_staged_bytes={4 * MIB}",
    f"broker.max_memory_bytes={96 * MIB}",
)
BALLAST = (MIB, 32 * KIB, KIB)
"""Sizes of the foreign values, the largest first."""


@contextmanager
def filled(run: Flow) -> Iterator[None]:
    """Somebody else's values take what memory there is, also what is freed meanwhile."""
    full, over = threading.Event(), threading.Event()
    client = redis.Redis.from_url(run.fleet.redis_url)
    names: list[str] = []

    def fill() -> None:
        while not over.is_set():
            for size in BALLAST:
                try:
                    while not over.is_set():
                        client.set(f"ballast:{len(names)}", bytes(size))
                        names.append(f"ballast:{len(names)}")
                except redis.exceptions.OutOfMemoryError:
                    continue
            full.set()

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    try:
        run.fleet.wait(full.is_set, "a full Redis")
        yield
    finally:
        over.set()
        filler.join()
        for first in range(0, len(names), 500):
            client.unlink(*names[first : first + 500])
        client.close()


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
    at = {name: run.state(name) for name in ("version", "trimmed", "lease_expires_ms")}
    for name, by in (("version", 3), ("trimmed", 1), ("lease_expires_ms", 1)):
        run.fleet.wait(lambda n=name, g=at[name] + by: run.state(n) >= g, f"{name} to move")  # type: ignore[misc]
    run.fleet.wait(
        lambda: run.metric("broker-0", "refusals_total", reason="full") > refused, "a fragment to be refused"
    )
