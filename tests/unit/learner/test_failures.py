"""What is kept of updates that were undone, and the words with which a run ends that made none."""

from pathlib import Path

import pytest

from penstock.broker.log.replies import Status
from penstock.learner.algorithms.algorithm import Update
from penstock.learner.failures import MOST_KEPT, cause, keep_evidence
from penstock.learner.feed.log_feed import LogBatch


def _log_batch(last: int) -> LogBatch:
    return LogBatch(
        last=last,
        trained=(last,),
        dropped={},
        steps=1,
        updates=(1,),
        versions=(1,),
        batch=None,
        round=None,
        size=1,
        created_us=0,
        assemble_s=0.0,
        origins={},
    )


@pytest.mark.promise("session-whose-batches-fail")
def test_a_session_that_fails_again_and_again_fills_no_disk(tmp_path: Path) -> None:
    failed = Update(applied=False, reason="nan", steps=0, gradient_steps=0, metrics={})
    kept = [keep_evidence(tmp_path, _log_batch(last), failed, 7) for last in range(1, MOST_KEPT + 6)]
    assert sorted(str(path.with_suffix("")) for path in tmp_path.iterdir()) == sorted(kept[-MOST_KEPT:])


def test_a_run_that_no_actor_came_to_does_not_say_that_its_actors_are_gone() -> None:
    assert "no rollout worker has come" in cause(Status(), {}, 300)
    assert "all actors are gone" in cause(Status(log_head=1), {}, 300)
