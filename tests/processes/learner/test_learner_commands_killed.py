"""A learner dies at each place of a restore and of a named checkpoint; the command is done all the same."""

import signal
from pathlib import Path
from typing import Final

import pytest
import torch

from penstock.broker.log.replies import Answer
from penstock.learner.checkpoint.store import FOLDER, CheckpointStore
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE
from tests.processes.learner.test_learner_restore import is_same, learned, tensors_of, updated
from tests.processes.learner.test_learner_resume import endless
from tests.support.run.learner_run import PATIENCE_S, LearnerThread, Producer, audited, learner_process, until
from tests.support.storage.redis_server import RedisServer

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


def died_and_resumed(
    server: RedisServer,
    run_dir: Path,
    producer: Producer,
    session: int,
    place: str,
    command: tuple[str, str],
    patch: pytest.MonkeyPatch,
) -> Answer:
    """One life that dies at a place while it follows a command; the answer that the next life gives."""
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
    return answer


def begun(server: RedisServer, run_dir: Path, producer: Producer) -> int:
    """A run with a checkpoint named "good" and updates behind it; its session."""
    with LearnerThread(server.url, run_dir, endless()) as learner:
        session = producer.open()
        updated(producer, session, 2)
        producer.answer("checkpoint", "good")
        updated(producer, session, 2)
        learner.drain()
    return session


@pytest.mark.parametrize("place", RESTORE)
def test_a_restore_is_done_by_the_learner_that_resumes(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with Producer(redis_server.url, tmp_path) as producer:
        session = begun(redis_server, tmp_path, producer)
        answer = died_and_resumed(
            redis_server, tmp_path, producer, session, place, ("restore", "good"), monkeypatch
        )
        latest = producer.status().latest
    assert (answer.refusal, answer.number) == (0, 2)
    within = CheckpointStore(tmp_path / "checkpoints", 3).read(answer.checkpoint_id)
    assert is_same(learned(within.tensors), learned(tensors_of(tmp_path, "good")))
    assert within.state["commands"]["newest"] == 2
    assert within.state["updates"] > tensors_and_state(tmp_path)["updates"]
    assert answer.version < latest.version
    audited(tmp_path, redis_server.url)


def tensors_and_state(run_dir: Path) -> dict[str, int]:
    return dict(CheckpointStore(run_dir / FOLDER, 1).read("good").state)


@pytest.mark.parametrize("place", CHECKPOINT)
def test_a_named_checkpoint_is_made_by_the_learner_that_resumes(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with Producer(redis_server.url, tmp_path) as producer:
        session = begun(redis_server, tmp_path, producer)
        answer = died_and_resumed(
            redis_server, tmp_path, producer, session, place, ("checkpoint", "better"), monkeypatch
        )
    assert answer.refusal == 0
    store = CheckpointStore(tmp_path / FOLDER, 1)
    assert sorted(store.ids()) == ["better", "good"]
    assert not list(store.directory.glob(".tmp-*"))
    better, good = store.read("better").tensors, store.read("good").tensors
    assert any(not torch.equal(better[name], good[name]) for name in learned(good))
    audited(tmp_path, redis_server.url)


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
