"""A run that was recorded is learned again from its recording, bit by bit, without its actors."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.checkpoint.store import BEST
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.feed.recording import FrameEntry
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE
from tests.processes.learner.test_learner_resume import checkpoint_now, newest
from tests.spine.test_lock_step import lock_step, restart_empty, weights_of
from tests.support.run.learner_run import (
    BATCH,
    CHARGE,
    PATIENCE_S,
    LearnerThread,
    Producer,
    audited,
    learner_process,
    settings,
    until,
)
from tests.support.storage.redis_server import RedisServer

UPDATES = 12


def recorded(given: Settings, folder: Path, **section: Any) -> Settings:
    """The same run, recorded."""
    return with_learner(given, record=folder, **section)


def replayed(given: Settings, folder: Path, **section: Any) -> Settings:
    """The same run, fed from that recording."""
    return with_learner(given, feed_from=folder, **section)


def with_learner(given: Settings, **section: Any) -> Settings:
    """Other settings of the learner."""
    return given.model_copy(update={"learner": given.learner.model_copy(update=section)})


def short(**over: Any) -> Settings:
    """Twelve updates with a linear schedule, staleness 1, and fragments that go stale."""
    algorithm = {
        "batch_steps": BATCH, "epochs": 2, "minibatches": 2, "staleness": 1, "stale_after": 3,
        "learning_rate_schedule": "linear",
    }  # fmt: skip
    learner = {"total_steps": UPDATES * BATCH, "checkpoint_interval_s": 3600, "stop_at_target": False}
    return settings(seed=7, algorithm=algorithm, learner=learner, **over)


def replay(server: RedisServer, run_dir: Path, given: Settings) -> dict[str, Any]:
    """Learn from a recording before a Redis that has never seen the run; no actor sends."""
    restart_empty(server)
    with LearnerThread(server.url, run_dir, given) as learner:
        return learner.finish()


def assert_equal_learning(one: Path, other: Path) -> None:
    """Weights, moments, normaliser and generators, bit by bit."""
    assert weights_of(one) == weights_of(other)
    first, second = newest(one).tensors, newest(other).tensors
    assert first.keys() == second.keys()
    for name in first.keys() - {BEST}:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.promise("learning-recording-run-gives")
def test_a_replayed_run_ends_with_the_same_bytes(redis_server: RedisServer, tmp_path: Path) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with LearnerThread(redis_server.url, first, given) as learner, Producer(redis_server.url) as producer:
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 3)
        until(lambda: producer.send_with_credit(session, update=1000), "credit for what will be stale")
        producer.drive([session], lambda: learner.ended)
        original = learner.finish()
    assert original["updates"] == UPDATES
    assert original["ledger"]["dropped"]["stale"] >= 1
    recording = Recording(folder)
    trained = sum(len(batch.fragments) for batch in recording.batches)
    assert trained == original["ledger"]["trained"] == len(recording.fragments)
    again = replay(redis_server, second, replayed(short(), folder))
    assert_equal_learning(first, second)
    for name in ("updates", "env_steps", "staleness", "ending"):
        assert again[name] == original[name], name
    assert again["ledger"] == {"acked": 0, "trained": 0, "dropped": {}, "resident": 0, "balanced": True}
    assert again["recording"] == {
        "folder": str(folder),
        "run": "run-l",
        "fragments": trained,
        "steps": trained * CHARGE,
        "batches_taken": UPDATES,
    }
    rewards = [line.get("mean_reward") for line in curve(second)]
    assert rewards[-1] == curve(first)[-1]["mean_reward"]


@pytest.mark.promise("learning-recording-run-gives")
def test_a_replayed_run_in_lock_step_ends_with_the_same_bytes(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(lock_step(), folder)
    with LearnerThread(redis_server.url, first, given) as learner, Producer(redis_server.url) as producer:
        sessions = [producer.open(name, data=name) for name in ("actor-0", "actor-1")]
        producer.drive(sessions, lambda: learner.ended)
        original = learner.finish()
    again = replay(redis_server, second, replayed(lock_step(), folder))
    assert_equal_learning(first, second)
    assert again["updates"] == original["updates"]


@pytest.mark.promise("recording-repeats-operator")
def test_what_an_operator_did_is_replayed(redis_server: RedisServer, tmp_path: Path) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with Producer(redis_server.url, first) as producer:
        with LearnerThread(redis_server.url, first, given) as learner:
            session = producer.open()
            producer.drive([session], lambda: producer.status().latest.update >= 3)
            producer.answer("checkpoint", "good")
            learner.drain()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FAILPOINTS_VARIABLE, "restore.published=kill")
            process = learner_process(redis_server.url, first, given, "--resume")
        producer.ask("restore", "good")
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        with LearnerThread(redis_server.url, first, given, resume=True) as learner:
            producer.drive([session], lambda: learner.ended)
            original = learner.finish()
        assert not producer.answer("restore", "good").refusal
        audited(first, redis_server.url)
    events = [one for one in Recording(folder).entries if isinstance(one, FrameEntry)]
    assert [(one.action, one.name) for one in events] == [("checkpoint", "good"), ("restore", "good")]
    again = replay(redis_server, second, replayed(short(), folder))
    assert_equal_learning(first, second)
    assert again["updates"] == original["updates"]
    assert (second / "named-checkpoints" / "good").is_dir()


@pytest.mark.promise("learning-recording-run-gives")
@pytest.mark.slow
def test_a_recording_holds_what_a_killed_learner_learned_once(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with Producer(redis_server.url, first) as producer:
        process = learner_process(redis_server.url, first, given)
        session = producer.open()
        producer.drive([session], lambda: producer.status().latest.update >= 3)
        checkpoint_now(producer, first)
        update = producer.status().latest.update
        producer.drive([session], lambda: producer.status().latest.update >= min(update + 2, UPDATES - 1))
        process.kill()
        process.wait()
        with LearnerThread(redis_server.url, first, given, resume=True) as learner:
            producer.drive([session], lambda: learner.ended)
            original = learner.finish()
        audited(first, redis_server.url)
    positions = [batch.entry.position for batch in Recording(folder).batches]
    assert positions == sorted(set(positions))
    assert len(Recording(folder).fragments) == original["ledger"]["trained"]
    replay(redis_server, second, replayed(short(), folder))
    assert_equal_learning(first, second)


@pytest.mark.promise("learning-recording-run-gives")
@pytest.mark.slow
def test_a_replay_that_was_killed_ends_like_one_that_was_not(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first, second = tmp_path / "recording", tmp_path / "first", tmp_path / "second"
    given = recorded(short(), folder)
    with LearnerThread(redis_server.url, first, given) as learner, Producer(redis_server.url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        learner.finish()
    restart_empty(redis_server)
    given = replayed(short(), folder, checkpoint_interval_s=0.0)
    with monkeypatch.context() as patch:
        patch.setenv(FAILPOINTS_VARIABLE, "update.before=kill@7")
        assert learner_process(redis_server.url, second, given).wait(PATIENCE_S) == -signal.SIGKILL
    assert newest(second).state["recorded"] == 6
    with LearnerThread(redis_server.url, second, given, resume=True) as learner:
        again = learner.finish()
    assert (again["updates"], again["recording"]["batches_taken"]) == (UPDATES, UPDATES)
    assert_equal_learning(first, second)


def test_a_recording_that_was_begun_elsewhere_is_refused(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording" / "recording.json").write_text("{}")
    given = recorded(short(), tmp_path / "recording")
    with (
        LearnerThread(redis_url, tmp_path / "run", given) as learner,
        pytest.raises(ConfigurationError, match="holds a recording already"),
    ):
        learner.finish()
    assert (tmp_path / "recording" / "recording.json").read_text() == "{}"


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
