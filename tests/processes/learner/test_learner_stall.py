"""A learner that makes no updates for `learner.stall_timeout_s` ends the run and says whose fault it is."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import Settings
from penstock.protocol.messages import Role
from penstock.runtime.exit import RunFailed
from tests.support.run.learner_run import BATCH, LearnerThread, Producer, settings, until


def impatient(**algorithm: Any) -> Settings:
    return settings(
        algorithm={"batch_steps": BATCH, "epochs": 1, "minibatches": 1} | algorithm,
        learner={"total_steps": 10**9, "checkpoint_interval_s": 3600, "stall_timeout_s": 2},
    )


def failed(learner: LearnerThread) -> str:
    """The words with which the run has failed; its books balance all the same."""
    with pytest.raises(RunFailed) as caught:
        learner.finish()
    account = json.loads((learner.run_dir / "learner.json").read_text())
    assert (account["ending"], account["finished"]) == ("stalled", False)
    assert account["ledger"]["balanced"]
    assert "no update for 2 s (learner.stall_timeout_s): " in str(caught.value)
    return str(caught.value)


@pytest.mark.promise("healthz-role-turns-red")
def test_a_run_whose_actors_are_gone_says_so(redis_url: str, tmp_path: Path) -> None:
    with LearnerThread(redis_url, tmp_path, impatient()) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 2)
        producer.close(session)
        producer.open("evaluator", Role.EVALUATION)
        assert "no rollout worker has an open session" in failed(learner)


def test_a_run_whose_weights_reach_no_actor_says_so(redis_url: str, tmp_path: Path) -> None:
    given = impatient(stale_after=3)
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended, update=1000)
        text = failed(learner)
    assert "all that arrived was dropped (" in text
    assert " stale)" in text
    assert "no actor acts with the newest weights: actor-0 acts with version 0, version 1" in text


def test_a_paused_run_is_not_judged(redis_url: str, tmp_path: Path) -> None:
    with LearnerThread(redis_url, tmp_path, impatient()) as learner, Producer(redis_url) as producer:
        producer.open()
        producer.control("pause")
        until(lambda: producer.status().desired.name == "PAUSED", "the pause")
        pause = threading.Event()
        for _ in range(40):  # twice as long as it may stand still
            assert not learner.ended
            pause.wait(0.1)
        producer.control("resume")
        failed(learner)
