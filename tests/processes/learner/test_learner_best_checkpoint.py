"""The checkpoint of the best evaluation outlives the newest ones, and a run can go back to it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import Settings
from penstock.learner.checkpoint.store import BEST, CheckpointStore, tensor_bytes
from penstock.policy import weights
from penstock.runtime.exit import RunFailed
from tests.processes.learner.test_learner_early_stopping import Judge
from tests.processes.learner.test_learner_resume import checkpoint_now, endless
from tests.support.run.learner_run import BATCH, LearnerThread, Producer, audited, settings, until


def keeping(**learner: Any) -> Settings:
    """Two checkpoints and the best one; an evaluation of two episodes after every other update."""
    section = {
        "total_steps": 10**9, "checkpoint_interval_s": 3600, "stop_at_target": False, "keep_checkpoints": 2,
        "keep_best": True,
    }  # fmt: skip
    evaluation = {"timeout_s": 60, "episodes": 2, "interval_steps": 2 * BATCH}
    return settings(learner=section | learner, evaluation=evaluation)


def policy_bytes(store: CheckpointStore, checkpoint: str) -> bytes:
    tensors = store.read(checkpoint).tensors
    own = {
        name.removeprefix("policy/"): tensor for name, tensor in tensors.items() if name.startswith("policy/")
    }
    return weights.encode({name: tensor.numpy() for name, tensor in own.items()})


FAR = 16
"""Updates, of which the hard bound of staleness lets half pass."""


@pytest.mark.promise("checkpoint-best-evaluation-kept")
def test_the_best_checkpoint_is_kept_and_gone_back_to(redis_url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, keeping()) as learner:
            judge = Judge(producer, learner)
            _, best, *_ = [judge.give(mean) for mean in (3.0, 9.0, 4.0, 5.0)]
            until(lambda: learner_saw(producer, 5.0), "the last result")
            seen = producer.status().latest.update
            producer.drive([judge.rollout], lambda: producer.status().latest.update > seen + FAR)
            under_way = store.ids()[0]
            # The third begins when the second has removed what is not kept.
            for _ in range(3):
                checkpoint_now(producer, tmp_path)
            assert under_way in store.ids(), "neither among the newest two nor the best, and in evaluation"
            result = learner.drain()
        kept = store.best()
        assert result["best_checkpoint"] == kept
        assert kept in store.ids()
        assert kept not in store.ids()[:2]
        assert len(store.ids()) == 3, "the newest two and the best: an evaluation ends with its process"
        stopped = store.read(store.ids()[0])
        blob = tensor_bytes(stopped.tensors[BEST])
        assert policy_bytes(store, kept) == blob
        assert stopped.state["evaluation"]["best"]["candidate"]["version"] == best
        before, update = producer.status().latest.version, store.read(kept).state["updates"]
        again = LearnerThread(redis_url, tmp_path, keeping(), resume=True, allow_loss=True, best=True)
        with again as learner:
            producer.drive([judge.rollout], lambda: producer.status().latest.version > before)
            assert producer.status().latest.update < stopped.state["updates"], "counted on from the best one"
            producer.drive([judge.rollout], lambda: producer.status().latest.update > update)
            resumed = learner.drain()
        audited(tmp_path, redis_url)
    assert resumed["ledger"]["balanced"]
    assert resumed["ledger"]["dropped"]["log_lost"] > 0
    assert update == stopped.state["evaluation"]["best"]["candidate"]["update"]
    new = [entry["parent"] for entry in lineage(tmp_path) if entry["checkpoint"] > stopped.id]
    assert new[0] == kept, "what was made since is no part of the lineage any more"
    assert update < store.read(store.ids()[0]).state["updates"] < stopped.state["updates"]


def test_the_last_checkpoint_is_named_where_it_is_the_best(redis_url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, keeping(total_updates=2)) as learner:
            Judge(producer, learner).give(9.0)
            result = learner.finish()
        audited(tmp_path, redis_url)
    assert result["evaluation"]["mean"] == 9.0
    assert result["best_checkpoint"] == store.best() == store.ids()[0]


def test_a_best_checkpoint_that_is_gone_is_not_named(redis_url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    with Producer(redis_url, tmp_path) as producer:
        with LearnerThread(redis_url, tmp_path, keeping()) as learner:
            judge = Judge(producer, learner)
            for mean in (3.0, 9.0, 4.0, 5.0):
                judge.give(mean)
            until(lambda: learner_saw(producer, 5.0), "the last result")
            for _ in range(3):
                checkpoint_now(producer, tmp_path)
            kept = learner.drain()["best_checkpoint"]
        known = store.read(kept).state["evaluation"]["best"]["candidate"]["checkpoint"]
        assert known not in store.ids()
        for _ in range(2):
            published = partial(is_newer, producer, producer.status().latest.version)
            again = LearnerThread(redis_url, tmp_path, keeping(), resume=True, allow_loss=True, best=True)
            with again as learner:
                producer.drive([judge.rollout], published)
                for _ in range(3):
                    checkpoint_now(producer, tmp_path)
                assert learner.drain()["best_checkpoint"] is None
            assert store.best() == kept
            assert kept in store.ids()


def lineage(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "lineage.jsonl").read_text().splitlines()]


def is_newer(producer: Producer, version: int) -> bool:
    return producer.status().latest.version > version


def learner_saw(producer: Producer, mean: float) -> bool:
    return f'"evaluation_deterministic": {mean}' in producer.status().learner_json


def test_without_a_best_checkpoint_there_is_none_to_go_back_to(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 1)
        learner.drain()
    again = LearnerThread(redis_url, tmp_path, endless(), resume=True, best=True)
    with again as learner, pytest.raises(RunFailed, match=r"learner\.keep_best=true"):
        learner.finish()
