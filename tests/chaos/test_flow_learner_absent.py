"""Nobody learns for a while: actors pause, nothing grows, no session ends; then they catch up."""

import time
from pathlib import Path

import pytest

from penstock.wire.limits import MIB
from tests.chaos.fleet import Shape
from tests.chaos.flow_run import BATCH_FRAGMENTS, Ceiling, flow

ACTORS = 8
SESSION_TIMEOUT_S = 3
"""Shorter than the absence: a paused actor must keep its session alive."""


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_actors_outwait_an_absent_learner(tmp_path: Path, seconds: int) -> None:
    """The budget bounds what they make meanwhile."""
    shape = Shape(
        actors=2,
        settings=(f"broker.session_timeout_s={SESSION_TIMEOUT_S}", "learner.lease_ttl_s=1"),
        actor_options=("--count", str(ACTORS // 2)),
    )
    with flow(tmp_path, pace_s=0.01, shape=shape) as run:
        run.settle_over(3 * BATCH_FRAGMENTS, "the first updates")
        run.fleet.kill("learner")
        opened = [run.metric(f"actor-{n}", "sessions_opened_total") for n in range(2)]
        acked = -1
        while acked != (acked := run.state("acked")):
            time.sleep(1.0)

        unlearned = (run.state("number") - run.state("settled")) * run.state("fragment_charge")
        assert unlearned <= run.state("budget"), "they went on beyond the budget"

        memory = Ceiling(run, "redis", "broker-0", "actor-0", "actor-1").watch(seconds)
        assert run.state("acked") == acked, "somebody sent without leave"
        memory.check(rise=8 * MIB)

        run.fleet.start("learner")
        run.settle_over(10 * BATCH_FRAGMENTS, "the learner to catch up")
        assert [run.metric(f"actor-{n}", "sessions_opened_total") for n in range(2)] == opened
        run.finish()
