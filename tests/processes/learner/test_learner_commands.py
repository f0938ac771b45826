"""Commands to a running learner: checkpoints, restores and flushes are done once, whichever process dies."""

import os
import signal
from pathlib import Path
from typing import Final

import pytest
import torch

from penstock.broker.log.replies import Answer, CommandRefusal
from penstock.learner.checkpoint import store
from penstock.learner.checkpoint.store import FOLDER, CheckpointStore
from penstock.learner.feed.recorded_feed import Recording
from penstock.protocol.messages import Role
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE
from tests.processes.learner.test_learner_resume import replaying
from tests.spine import test_equal_runs as ranks_of
from tests.spine.test_equal_runs import assert_equal_learning, recorded, replay, replayed
from tests.support.run.harness import eventually
from tests.support.run.learner_run import (
    BATCH,
    CHARGE,
    PATIENCE_S,
    LearnerThread,
    Producer,
    account,
    audited,
    endless,
    learner_process,
    settings,
    until,
    updated,
)
from tests.support.storage.redis_server import RedisServer

FRAGMENTS = BATCH // CHARGE
"""Of a batch."""


def tensors_of(run_dir: Path, name: str) -> dict[str, torch.Tensor]:
    return CheckpointStore(run_dir / FOLDER, 1).read(name).tensors


def learned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Model, optimiser and normalisers."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("policy/", "optimiser/"))}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def leave_waiting(producer: Producer, session: int, fragments: int) -> None:
    """Whole batches are learned, and this many fragments of the next one are in the log."""

    def is_so() -> bool:
        if producer.acked % FRAGMENTS == fragments:
            return True
        producer.send_with_credit(session, 1)
        return False

    until(is_so, "fragments in the log")
    until(lambda: producer.status().latest.update == producer.acked // FRAGMENTS, "all whole batches")


@pytest.mark.promise("restore-takes-model-optimiser", "command-operator-done-once")
def test_a_restored_run_continues_with_the_old_model_and_its_own_counts(
    redis_url: str, tmp_path: Path
) -> None:
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
        assert producer.answer("restore", "good") == restored, "the same id is the same command"
        assert producer.status().latest.version == restored.version
        assert restored.version == after.latest.version > before.latest.version
        within = CheckpointStore(tmp_path / "checkpoints", 3).read(restored.checkpoint_id)
        assert is_same(learned(within.tensors), learned(tensors_of(tmp_path, "good")))
        state = within.state
        assert state["updates"] == after.latest.update == before.latest.update, "updates go on"
        assert state["totals"]["env_steps"] == before.latest.update * BATCH
        assert state["restored_from"] > before.latest.version
        updated(producer, session, 2)
        result = learner.drain()
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
    assert result["ledger"]["dropped"]["restored"] >= 8
    assert audited(tmp_path, redis_url)["restored"] == result["ledger"]["dropped"]["restored"]
    assert restored.version > 0


@pytest.mark.promise("fit-refused-name-run", "named-checkpoints-bounded-never")
def test_settings_that_do_not_fit_are_refused_by_name(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_NAMED", 2)
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
        named = CheckpointStore(tmp_path / FOLDER, 1)
        good = named.read("good")
        sections = good.state["sections"] | {"policy": "another network"}
        named.write("wide", good.tensors, good.state | {"sections": sections})
        mismatch = producer.answer("restore", "wide")
        assert mismatch.refusal == CommandRefusal.MISMATCH
        assert "policy=" in mismatch.detail
        full = producer.answer("checkpoint", "beyond")
        assert full.refusal == CommandRefusal.LIMIT
        assert f"remove a folder from {tmp_path / FOLDER}" in full.detail
        (tmp_path / FOLDER / "good" / "tensors.safetensors").write_bytes(b"")
        assert producer.answer("restore", "good", "damaged").refusal == CommandRefusal.MISMATCH
        updated(producer, session, 1)
        result = learner.drain()
    assert result["ledger"]["dropped"] == {}, "nothing was given up for what was refused"


@pytest.mark.promise("restore-takes-model-optimiser")
def test_a_lock_step_run_loses_one_round(redis_url: str, tmp_path: Path) -> None:
    given = settings(algorithm={"staleness": 0}, learner={"total_steps": 10**9})
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, given) as learner:
        session = producer.open()
        updated(producer, session, 2)
        producer.answer("checkpoint", "good")
        updated(producer, session, 2)
        producer.answer("restore", "good")
        updated(producer, session, 2)
        result = learner.drain()
    assert result["ledger"]["dropped"] in ({"restored": 1}, {})


RESTORE: Final = (
    "restore.applied", "restore.published", "commit.before",
    *(
        pytest.param(place, marks=pytest.mark.slow)
        for place in (
            "command.before", "restore.read", "write.before", "fsync.after", "rename.before", "rename.after",
            "commit.after", "commit.trimming", "command.after",
        )
    ),
)  # fmt: skip
CHECKPOINT: Final = (
    "rename.after",
    *(
        pytest.param(place, marks=pytest.mark.slow)
        for place in ("command.before", "write.after", "rename.before", "commit.before", "command.after")
    ),
)


def begun(server: RedisServer, run_dir: Path, producer: Producer) -> int:
    """A run with a checkpoint named "good" and updates behind it; its session."""
    with LearnerThread(server.url, run_dir, endless()) as learner:
        session = producer.open()
        updated(producer, session, 2)
        producer.answer("checkpoint", "good")
        updated(producer, session, 2)
        learner.drain()
    return session


def died_and_resumed(
    server: RedisServer, run_dir: Path, patch: pytest.MonkeyPatch, place: str, command: tuple[str, str]
) -> tuple[Answer, int]:
    """A life that dies at a place while it follows a command; the next one's answer and last version."""
    with Producer(server.url, run_dir) as producer:
        session = begun(server, run_dir, producer)
        with patch.context() as within:
            within.setenv(FAILPOINTS_VARIABLE, f"{place}=kill")
            process = learner_process(server.url, run_dir, endless(), "--resume")
        updated(producer, session, 1)
        producer.ask(*command)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        with LearnerThread(server.url, run_dir, endless(), resume=True) as learner:
            answer = producer.answer(*command)
            updated(producer, session, 2)
            learner.drain()
        version = producer.status().latest.version
    audited(run_dir, server.url)
    return answer, version


@pytest.mark.parametrize("place", RESTORE)
def test_the_resuming_learner_does_the_restore(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    answer, version = died_and_resumed(redis_server, tmp_path, monkeypatch, place, ("restore", "good"))
    assert (answer.refusal, answer.number) == (0, 2)
    within = CheckpointStore(tmp_path / "checkpoints", 3).read(answer.checkpoint_id)
    good = CheckpointStore(tmp_path / FOLDER, 1).read("good")
    assert is_same(learned(within.tensors), learned(good.tensors))
    assert within.state["commands"]["newest"] == 2
    assert within.state["updates"] > good.state["updates"]
    assert answer.version < version


@pytest.mark.parametrize("place", CHECKPOINT)
def test_a_named_checkpoint_is_made_by_the_learner_that_resumes(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    answer, _ = died_and_resumed(redis_server, tmp_path, monkeypatch, place, ("checkpoint", "better"))
    assert answer.refusal == 0
    named = CheckpointStore(tmp_path / FOLDER, 1)
    assert sorted(named.ids()) == ["better", "good"]
    assert not list(named.directory.glob(".tmp-*"))
    better, good = named.read("better").tensors, named.read("good").tensors
    assert any(not torch.equal(better[name], good[name]) for name in learned(good))


def test_a_restore_whose_checkpoint_is_damaged_is_done_again(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(redis_server.url, tmp_path) as producer:
        session = begun(redis_server, tmp_path, producer)
        monkeypatch.setenv(FAILPOINTS_VARIABLE, "command.after=kill")
        process = learner_process(redis_server.url, tmp_path, endless(), "--resume")
        updated(producer, session, 1)
        answer = producer.answer("restore", "good")
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        damaged = tmp_path / "checkpoints" / answer.checkpoint_id / "tensors.safetensors"
        damaged.write_bytes(b"")
        with LearnerThread(redis_server.url, tmp_path, endless(), resume=True) as learner:
            until(lambda: producer.answer("restore", "good").version > answer.version, "another restore")
            updated(producer, session, 1)
            learner.drain()
        again = producer.ask("restore", "good")
    assert again.answer is not None
    assert again.answer.checkpoint_id > answer.checkpoint_id
    assert again.number == answer.number
    audited(tmp_path, redis_server.url)


def answered(producer: Producer, action: str, argument: str) -> Answer:
    producer.ask(action, argument)
    eventually(lambda: producer.ask(action, argument).answer is not None, "an answer", ranks_of.PATIENCE_S)
    return producer.answer(action, argument)


@pytest.mark.promise("ranks-go-back-together")
def test_both_ranks_are_restored_and_continue(redis_url: str, tmp_path: Path) -> None:
    with (
        Producer(redis_url, tmp_path) as producer,
        ranks_of.two_ranks(tmp_path, redis_url, ranks_of.endless(ranks=2)) as ranks,
    ):
        session = producer.open()
        updated(producer, session, 2)
        answered(producer, "checkpoint", "good")
        updated(producer, session, 2)
        producer.control("pause")
        answered(producer, "checkpoint", "")
        waiting = producer.acked + 8
        eventually(
            lambda: producer.send_with_credit(session) + producer.acked >= waiting,
            "batches",
            ranks_of.PATIENCE_S,
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
        with ranks_of.two_ranks(tmp_path, redis_url, ranks_of.endless(ranks=2)) as ranks:
            session = producer.open()
            updated(producer, session, 2)
            answered(producer, "checkpoint", "good")
            updated(producer, session, 1)
            os.kill(ranks.pid(1), signal.SIGSTOP)
            producer.ask("restore", "good")
            os.kill(ranks.pid(1), signal.SIGKILL)
            assert ranks.process.wait(ranks_of.PATIENCE_S) != 0
        assert producer.ask("restore", "good").answer is None
        for said in tmp_path.glob("*.endpoint"):
            said.unlink()
        with ranks_of.two_ranks(tmp_path, redis_url, ranks_of.endless(ranks=2)) as ranks:
            restored = answered(producer, "restore", "good")
            updated(producer, session, 1)
            assert ranks.end() == 0
    assert not restored.refusal
    assert audited(tmp_path, redis_url)["trained"] > 0


@pytest.mark.promise("flush-takes-pending-much")
def test_a_flush_takes_pending_steps_as_one_batch_or_leaves_too_few(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url, tmp_path) as producer, LearnerThread(redis_url, tmp_path, endless()) as learner:
        session = producer.open()
        updated(producer, session, 2)
        leave_waiting(producer, session, 1)
        few = producer.answer("flush", str(2 * CHARGE))
        assert (few.refusal, few.steps) == (CommandRefusal.TOO_FEW_STEPS, CHARGE)
        assert f"{CHARGE} steps are pending, fewer than the {2 * CHARGE} asked for" in few.detail
        many = producer.answer("flush", str(BATCH + 1))
        assert many.refusal == CommandRefusal.TOO_FEW_STEPS
        assert "at most that" in many.detail
        updated(producer, session, 1)
        leave_waiting(producer, session, FRAGMENTS - 1)
        before = producer.status().latest.update
        flushed = producer.answer("flush", str(CHARGE))
        assert (flushed.refusal, flushed.steps) == (0, BATCH - CHARGE), flushed
        until(lambda: producer.status().latest.update == before + 1, "the update of it")
        assert producer.answer("flush", str(CHARGE)) == flushed, "the same id, the same flush"
        updated(producer, session, 2)
        result = learner.drain()
    assert result["ledger"]["dropped"] == {}
    assert (result["ledger"]["trained"] + 1) % FRAGMENTS == 0, "whole batches but for the flush"
    audited(tmp_path, redis_url)


@pytest.mark.promise("flush-takes-pending-much")
@pytest.mark.parametrize("kind", ["lock_step", "replay"])
def test_lock_step_and_replay_refuse_a_flush(redis_url: str, tmp_path: Path, kind: str) -> None:
    given = settings(algorithm={"staleness": 0}) if kind == "lock_step" else replaying()
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, given):
        producer.open()
        refused = producer.answer("flush", "1")
    assert refused.refusal == CommandRefusal.UNSUPPORTED
    assert "has no flush" in refused.detail


@pytest.mark.promise("flush-takes-pending-much")
def test_a_policy_server_is_awaited(redis_url: str, tmp_path: Path) -> None:
    with Producer(redis_url) as producer, LearnerThread(redis_url, tmp_path, endless()):
        session = producer.open()
        server = producer.open("server", Role.SERVER)
        updated(producer, session, 1)
        leave_waiting(producer, session, 1)
        number = producer.ask("flush", "1").number
        until(lambda: producer.flush_wanted(server) == number, "the server to be asked")
        assert producer.flush_wanted(session) == 0, "an actor that serves no client is not asked"
        leave_waiting(producer, session, 2)
        assert producer.ask("flush", "1").answer is None
        producer.flush_wanted(server, flushed=number)
        assert producer.answer("flush", "1").steps == 2 * CHARGE


@pytest.mark.promise("flush-takes-pending-much")
@pytest.mark.parametrize(
    "place",
    [
        "update.after",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in (
                "command.before",
                "flush.decided",
                "update.before",
                "commit.before",
                "command.after",
            )
        ),
    ],
)
def test_a_killed_learner_takes_the_same_flush_again(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(endless(), folder)
    with Producer(redis_server.url, first) as producer:
        with LearnerThread(redis_server.url, first, given) as learner:
            session = producer.open()
            updated(producer, session, 2)
            leave_waiting(producer, session, 2)
            learner.drain()
        with monkeypatch.context() as within:
            within.setenv(FAILPOINTS_VARIABLE, f"{place}=kill")
            process = learner_process(redis_server.url, first, given, "--resume")
        number = producer.ask("flush", "1").number
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        decided = producer.ask("flush", "1").through
        producer.send_with_credit(session, 1)
        with LearnerThread(redis_server.url, first, given, resume=True) as learner:
            answer = producer.answer("flush", "1")
            updated(producer, session, 1)
            learner.drain()
        audited(first, redis_server.url)
    assert (answer.refusal, answer.number) == (0, number)
    if decided is not None:
        assert answer.steps == 2 * CHARGE
    flushes = [one for one in Recording(folder).batches if one.entry.flush]
    assert [len(one.fragments) * CHARGE for one in flushes] == [answer.steps]
    replay(redis_server, second, replayed(endless(), folder))
    assert_equal_learning(first, second)
