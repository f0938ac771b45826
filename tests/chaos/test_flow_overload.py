"""Actors that make twice as much as the learner takes: they wait, and nothing is evicted, lost or too old."""

from pathlib import Path

import pytest

from penstock.wire.limits import MIB
from tests.chaos.fleet import Shape
from tests.chaos.flow_run import BATCH_FRAGMENTS, Ceiling, flow

PACE_S = 0.2
TAKEN_PER_S = BATCH_FRAGMENTS / PACE_S
ACTORS = 8
STALENESS = 3
MAX_LOG, MAX_STAGED = 6 * MIB, 4 * MIB
MAX_MEMORY = MAX_LOG + MAX_STAGED + 65 * MIB
"""The least that broker and learner accept, to a MiB."""


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_twice_overload_with_a_small_buffer(tmp_path: Path, seconds: int) -> None:
    """No eviction, no growth, no loss; staleness in its bound; and a learner that speeds up is fed at once."""
    offered = 2 * TAKEN_PER_S / ACTORS
    shape = Shape(
        actors=2,
        settings=(
            f"broker.max_memory_bytes={MAX_MEMORY}",
            f"broker.max_log_bytes={MAX_LOG}",
            f"broker.max_staged_bytes={MAX_STAGED}",
            f"algorithm.staleness={STALENESS}",
        ),
        actor_options=("--count", str(ACTORS // 2), "--rate", str(offered)),
    )
    with flow(tmp_path, pace_s=PACE_S, shape=shape) as run:
        run.settle_over(3 * BATCH_FRAGMENTS, "the first updates")
        before = run.state("settled")
        memory = Ceiling(run, "redis", "broker-0", "learner", "actor-0", "actor-1").watch(seconds)

        taken = run.state("settled") - before
        waited = sum(run.metric(f"actor-{n}", "actor_wait_seconds_total") for n in range(2))
        assert waited > 0, "nobody had to wait: this was no overload"
        assert taken < 1.5 * TAKEN_PER_S * seconds, "the learner was not slowed down"
        assert run.info("stats")["evicted_keys"] == 0
        assert memory.most_data < MAX_MEMORY
        assert run.state("log_bytes") <= MAX_LOG
        memory.check(rise=16 * MIB)
        assert run.share_above("learner", "staleness_updates", STALENESS + 1) <= 0.01

        run.pace(0.0)
        run.settle_over(int(4 * TAKEN_PER_S), "a learner that has sped up to be fed")
        run.finish()
