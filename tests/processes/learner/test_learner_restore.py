"""Named checkpoints are restored while the run goes on, and nothing that counts goes back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.broker.log.replies import CommandRefusal
from penstock.learner.checkpoint.store import FOLDER, MAX_NAMED, CheckpointStore
from tests.processes.learner.test_learner_replay import replaying
from tests.processes.learner.test_learner_resume import endless
from tests.support.run.learner_run import BATCH, CHARGE, LearnerThread, Producer, audited, settings, until

FRAGMENTS = BATCH // CHARGE
"""Of a batch."""


def tensors_of(run_dir: Path, name: str) -> dict[str, torch.Tensor]:
    return CheckpointStore(run_dir / FOLDER, 1).read(name).tensors


def learned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Model, optimiser and normalisers."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("policy/", "optimiser/"))}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def updated(producer: Producer, session: int, updates: int) -> None:
    through = producer.status().latest.update + updates
    producer.drive([session], lambda: producer.status().latest.update >= through)


def leave_waiting(producer: Producer, session: int, fragments: int) -> None:
    """Whole batches are learned, and this many fragments of the next one are in the log."""

    def is_so() -> bool:
        if producer.acked % FRAGMENTS == fragments:
            return True
        producer.send_with_credit(session, 1)
        return False

    until(is_so, "fragments in the log")
    until(lambda: producer.status().latest.update == producer.acked // FRAGMENTS, "all whole batches")


@pytest.mark.promise("restore-takes-model-optimiser")
def test_a_restored_run_goes_on_with_the_old_model_and_its_own_counts(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        updated(producer, session, 3)
        named = producer.answer("checkpoint", "good")
        assert named.checkpoint_id, named
        updated(producer, session, 4)
        leave_waiting(producer, session, 1)
        before = producer.status()
        restored = producer.answer("restore", "good")
        after = producer.status()
        assert restored.version == after.latest.version > before.latest.version
        newest = CheckpointStore(tmp_path / "checkpoints", 3).read(restored.checkpoint_id)
        assert is_same(learned(newest.tensors), learned(tensors_of(tmp_path, "good")))
        state = newest.state
        assert state["updates"] == after.latest.update == before.latest.update, "updates go on"
        assert state["totals"]["env_steps"] == before.latest.update * BATCH
        assert state["restored_from"] > before.latest.version
        updated(producer, session, 2)
        result = learner.drain()
    assert result["ledger"]["balanced"]
    assert result["ledger"]["dropped"] == {"restored": 1}
    assert audited(tmp_path, redis_url)["restored"] == 1


@pytest.mark.promise("restore-takes-model-optimiser")
def test_a_batch_that_was_read_ahead_is_dropped_as_restored(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        updated(producer, session, 2)
        producer.answer("checkpoint", "good")
        producer.control("pause")
        producer.answer("checkpoint")  # paused by now, or it is answered behind a batch
        waiting = producer.acked + 8
        until(
            lambda: producer.send_with_credit(session) + producer.acked >= waiting, "two batches in the log"
        )
        restored = producer.answer("restore", "good")
        updates = producer.status().latest.update
        producer.control("resume")
        updated(producer, session, 2)
        result = learner.drain()
    assert result["updates"] >= updates + 2
    assert result["ledger"]["balanced"]
    assert result["ledger"]["dropped"]["restored"] >= 8
    assert audited(tmp_path, redis_url)["restored"] == result["ledger"]["dropped"]["restored"]
    assert restored.version > 0


@pytest.mark.promise("fit-refused-name-run")
def test_what_does_not_fit_is_refused_by_name(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        updated(producer, session, 1)
        unknown = producer.answer("restore", "nothing")
        assert (unknown.refusal, unknown.checkpoint_id) == (CommandRefusal.NAME, "")
        assert "there are: none" in unknown.detail
        producer.answer("checkpoint", "good")
        assert "there are: good" in producer.answer("restore", "other").detail
        taken = producer.answer("checkpoint", "good", "again")
        assert taken.refusal == CommandRefusal.NAME
        assert str(tmp_path / FOLDER / "good") in taken.detail
        rewritten(tmp_path, "wide", {"sections": {"policy": "another network"}})
        mismatch = producer.answer("restore", "wide")
        assert mismatch.refusal == CommandRefusal.MISMATCH
        assert "policy=" in mismatch.detail
        (tmp_path / FOLDER / "good" / "tensors.safetensors").write_bytes(b"")
        assert producer.answer("restore", "good", "damaged").refusal == CommandRefusal.MISMATCH
        updated(producer, session, 1)
        result = learner.drain()
    assert result["ledger"]["dropped"] == {}, "nothing was given up for what was refused"


def rewritten(run_dir: Path, name: str, over: dict[str, Any]) -> None:
    """A named checkpoint like "good" with parts of its state exchanged."""
    store = CheckpointStore(run_dir / FOLDER, 1)
    good = store.read("good")
    state = {key: {**value, **over[key]} if key in over else value for key, value in good.state.items()}
    store.write(name, good.tensors, state)


@pytest.mark.promise("named-checkpoints-bounded-never")
def test_named_checkpoints_are_bounded_and_outlive_the_others(redis_url: str, tmp_path: Path) -> None:
    given = settings(learner={"total_steps": 10**9, "checkpoint_interval_s": 0, "keep_checkpoints": 2})
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, given):
        session = producer.open()
        updated(producer, session, 1)
        assert not producer.answer("checkpoint", "good").refusal
        for number in range(MAX_NAMED - 1):
            rewritten(tmp_path, f"n{number}", {})
        full = producer.answer("checkpoint", "beyond")
        assert full.refusal == CommandRefusal.LIMIT
        assert f"remove a folder from {tmp_path / FOLDER}" in full.detail
        shutil.rmtree(tmp_path / FOLDER / "n0")
        assert not producer.answer("checkpoint", "beyond", "again").refusal
        updated(producer, session, 4)
        assert len(CheckpointStore(tmp_path / FOLDER, 1).ids()) == MAX_NAMED
        assert len(CheckpointStore(tmp_path / "checkpoints", 2).ids()) <= 3


@pytest.mark.promise("command-operator-done-once")
def test_the_same_request_id_is_the_same_command(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        updated(producer, session, 1)
        producer.answer("checkpoint", "good")
        first = producer.answer("restore", "good", "one")
        version = producer.status().latest.version
        assert producer.answer("restore", "good", "one") == first
        assert producer.status().latest.version == version
        other = producer.answer("restore", "good", "two")
        assert (other.number, other.version) > (first.number, first.version)
        learner.drain()


@pytest.mark.promise("restore-takes-model-optimiser")
def test_replay_keeps_what_it_holds(redis_url: str, tmp_path: Path) -> None:
    given = replaying(learner={"total_steps": 10**9, "checkpoint_interval_s": 3600, "stop_at_target": False})
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, given) as learner:
        session = producer.open()
        updated(producer, session, 8)
        producer.answer("checkpoint", "good")
        updated(producer, session, 8)
        restored = producer.answer("restore", "good")
        newest = CheckpointStore(tmp_path / "checkpoints", 3).read(restored.checkpoint_id)
        good = CheckpointStore(tmp_path / FOLDER, 1).read("good")
        same = [name for name in good.tensors if name.startswith(("policy/", "target/", "optimiser/"))]
        assert same
        assert all(torch.equal(newest.tensors[name], good.tensors[name]) for name in same)
        replay, old = newest.state["numbers"]["replay"], good.state["numbers"]["replay"]
        assert replay["inserted"] > old["inserted"]
        assert replay["taken"] > old["taken"]
        updated(producer, session, 4)
        result = learner.drain()
    assert result["ledger"]["dropped"] == {}
    assert result["ledger"]["balanced"]


@pytest.mark.promise("restore-takes-model-optimiser")
def test_a_lock_step_run_loses_one_round(redis_url: str, tmp_path: Path) -> None:
    given = settings(
        algorithm={"batch_steps": BATCH, "epochs": 1, "minibatches": 1, "staleness": 0},
        learner={"total_steps": 10**9, "checkpoint_interval_s": 3600, "stop_at_target": False},
    )
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, given) as learner:
        session = producer.open()
        updated(producer, session, 2)
        producer.answer("checkpoint", "good")
        updated(producer, session, 2)
        producer.answer("restore", "good")
        updated(producer, session, 2)
        result = learner.drain()
    assert result["ledger"]["balanced"]
    assert json.dumps(result["ledger"]["dropped"]) in ('{"restored": 1}', "{}")
