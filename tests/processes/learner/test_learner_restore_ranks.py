"""A restore of a learner of two ranks: both go back, or neither does."""

import os
import signal
from pathlib import Path

import pytest

from penstock.broker.log.replies import Answer
from penstock.learner.checkpoint.store import CheckpointStore
from tests.processes.learner.test_learner_restore import is_same, learned, tensors_of, updated
from tests.spine.test_equal_runs import PATIENCE_S, endless, two_ranks
from tests.support.run.broker_process import eventually
from tests.support.run.learner_run import Producer, account, audited


def answered(producer: Producer, action: str, argument: str) -> Answer:
    producer.ask(action, argument)
    eventually(lambda: producer.ask(action, argument).answer is not None, "an answer", PATIENCE_S)
    return producer.answer(action, argument)


@pytest.mark.promise("ranks-go-back-together")
def test_both_ranks_go_back_and_go_on(redis_url: str, tmp_path: Path) -> None:
    with (
        Producer(redis_url, tmp_path) as producer,
        two_ranks(tmp_path, redis_url, endless(ranks=2)) as ranks,
    ):
        session = producer.open()
        updated(producer, session, 2)
        answered(producer, "checkpoint", "good")
        updated(producer, session, 2)
        producer.control("pause")
        answered(producer, "checkpoint", "")
        waiting = producer.acked + 8
        eventually(
            lambda: producer.send_with_credit(session) + producer.acked >= waiting, "batches", PATIENCE_S
        )
        restored = answered(producer, "restore", "good")
        within = CheckpointStore(tmp_path / "checkpoints", 3).read(restored.checkpoint_id)
        assert is_same(learned(within.tensors), learned(tensors_of(tmp_path, "good")))
        producer.control("resume")
        updated(producer, session, 3)
        assert ranks.end() == 0
    assert account(tmp_path)["ledger"]["balanced"]
    assert account(tmp_path)["ledger"]["dropped"]["restored"] >= 8
    assert audited(tmp_path, redis_url)["restored"] >= 8


@pytest.mark.promise("ranks-go-back-together")
def test_a_rank_that_is_gone_leaves_the_restore_to_the_learner_that_resumes(
    redis_url: str, tmp_path: Path
) -> None:
    with Producer(redis_url, tmp_path) as producer:
        with two_ranks(tmp_path, redis_url, endless(ranks=2)) as ranks:
            session = producer.open()
            updated(producer, session, 2)
            answered(producer, "checkpoint", "good")
            updated(producer, session, 1)
            os.kill(ranks.pid(1), signal.SIGSTOP)
            producer.ask("restore", "good")
            os.kill(ranks.pid(1), signal.SIGKILL)
            assert ranks.process.wait(PATIENCE_S) != 0
        assert producer.ask("restore", "good").answer is None
        for said in tmp_path.glob("*.endpoint"):
            said.unlink()
        with two_ranks(tmp_path, redis_url, endless(ranks=2)) as ranks:
            restored = answered(producer, "restore", "good")
            updated(producer, session, 1)
            assert ranks.end() == 0
    assert not restored.refusal
    assert audited(tmp_path, redis_url)["trained"] > 0
