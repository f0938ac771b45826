"""A learner with replay.

The log is the storage, what entered is settled at once, and a killed learner goes on as it was.
"""

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.settings import Settings, load
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore
from tests.processes.learner.test_learner_resume import assert_same
from tests.support.run.learner_run import (
    CHARGE,
    RUN,
    SLOTS,
    STEPS,
    LearnerThread,
    Producer,
    audited,
    checkpoint_now,
    learner_process,
    newest,
    until,
)
from tests.support.storage.redis_server import RedisServer

FRAGMENTS = 60
CAPACITY = 12 * CHARGE


def replaying(**over: Any) -> Settings:
    """DQN on CartPole's spaces, prioritised.

    Fragments of 4 × 2 steps, a memory of twelve, half a gradient step a step.
    """
    base: dict[str, Any] = {
        "run": RUN,
        "environment": {"id": "CartPole-v1", "count": SLOTS},
        "actor": {"unroll_length": STEPS, "count": 1},
        "policy": {"hidden_sizes": [8], "normalise_observations": True},
        "algorithm": {
            "name": "dqn", "capacity": CAPACITY, "capacity_bytes": 100_000, "learning_starts": 4 * CHARGE,
            "batch_size": 16, "replay_ratio": 0.5, "error_steps": 4 * CHARGE, "n_step": 2,
            "prioritised": True, "publish_period": 4, "target_period": 10,
        },
        "learner": {
            "checkpoint_interval_s": 3600, "total_steps": FRAGMENTS * CHARGE, "stop_at_target": False,
        },
        "evaluation": {"timeout_s": 1, "episodes": 2},
        "broker": {"redis_wait_s": 20},
    }  # fmt: skip
    return load([base, over])


def entries_of(checkpoint: Checkpoint) -> list[int]:
    numbers: list[int] = checkpoint.tensors["replay/entries"][:, 0].tolist()
    return numbers


def test_experience_is_settled_when_it_enters_replay(redis_url: str, tmp_path: Path) -> None:
    given = replaying(algorithm={"learning_starts": 5 * CHARGE, "error_steps": 4 * CHARGE})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: producer.acked >= 4)
        until(lambda: producer.status().settled >= 4, "the fragments to be settled")
        status = producer.status()
        assert (status.latest.version, status.budget_steps) == (1, 4 * CHARGE)
        learner.drain()


def test_what_was_learned_last_is_published_when_an_operator_stops_the_learner(
    redis_url: str, tmp_path: Path
) -> None:
    given = replaying(algorithm={"publish_period": 10**6}, learner={"total_steps": 20 * CHARGE})
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended or producer.status().settled >= 15)
        assert producer.status().latest.version == 1
        producer.control("stop")
        result = learner.finish()
        latest = producer.status().latest
    assert (result["ending"], result["finished"]) == ("stopped", False)
    assert list((tmp_path / "checkpoints").iterdir())
    assert result["updates"] >= 15
    assert (latest.version, latest.update) == (2, result["updates"])


def run_whole(url: str, run_dir: Path) -> Checkpoint:
    with LearnerThread(url, run_dir, replaying()) as learner, Producer(url) as producer:
        session = producer.open(data="same")
        producer.drive([session], lambda: learner.ended)
        learner.finish()
    return newest(run_dir)


def run_killed(url: str, run_dir: Path) -> Checkpoint:
    """The same fragments; the learner is killed some fragments behind a checkpoint, and resumed."""
    with Producer(url, run_dir) as producer:
        process = learner_process(url, run_dir, replaying())
        session = producer.open(data="same")
        producer.drive([session], lambda: producer.status().settled >= 30)
        before = entries_of(checkpoint_now(producer, run_dir))
        producer.drive([session], lambda: producer.status().settled >= 40)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert producer.status().trim_floor < before[0], "the log holds what replay held"
        process = learner_process(url, run_dir, replaying(), "--resume")
        producer.drive([session], lambda: process.poll() is not None)
        assert process.returncode == 0, (run_dir / "learner.log").read_text()
    return newest(run_dir)


@pytest.mark.promise("content-replay-log-read")
def test_a_killed_learner_ends_bit_by_bit_like_one_that_was_not(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    whole = run_whole(redis_server.url, tmp_path / "whole")
    redis_server.kill()
    redis_server.forget()
    redis_server.start()
    killed = run_killed(redis_server.url, tmp_path / "killed")
    assert_same(whole, killed)
    numbers = entries_of(killed)
    assert numbers == list(range(FRAGMENTS - CAPACITY // CHARGE + 1, FRAGMENTS + 1))
    assert killed.state["numbers"]["replay"]["inserted"] == FRAGMENTS * CHARGE
    assert killed.state["totals"]["trained"] == FRAGMENTS
    assert "comes back smaller" not in (tmp_path / "killed" / "learner.log").read_text()
    assert audited(tmp_path / "killed", redis_server.url)["trained"] == FRAGMENTS


@pytest.mark.promise("fragments-kept-replay-trimmed")
def test_a_log_that_fills_up_is_trimmed_behind_what_replay_holds(redis_url: str, tmp_path: Path) -> None:
    given = replaying(
        algorithm={"capacity_bytes": 6_000, "replay_ratio": 0.1},
        broker={"max_log_bytes": 60_000},
        learner={"total_steps": 200 * CHARGE},
    )
    with LearnerThread(redis_url, tmp_path, given) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        learner.finish()
        floor = producer.status().trim_floor
    store = CheckpointStore(tmp_path / "checkpoints", 3)
    last, second, *_ = (store.read(name) for name in store.ids())
    assert len((tmp_path / "lineage.jsonl").read_text().splitlines()) >= 4
    assert floor == entries_of(second)[0] - 1
    assert entries_of(last)[0] > entries_of(second)[0]


@pytest.mark.promise("content-replay-log-read")
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_all_that_it_held(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = replaying(learner={"total_steps": 10**6})
    with Producer(redis_url) as producer:
        with LearnerThread(redis_url, tmp_path, given) as learner:
            session = producer.open()
            producer.drive([session], lambda: producer.status().settled >= 20)
            before = checkpoint_now(producer, tmp_path)
            producer.drive([session], lambda: producer.status().settled >= 40)
            learner.drain()
        last = newest(tmp_path)
        assert entries_of(before)[0] < entries_of(last)[0]
        damaged = tmp_path / "checkpoints" / last.id / "tensors.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        producer.control("pause")
        epoch = producer.status().epoch
        with caplog.at_level(logging.INFO), LearnerThread(redis_url, tmp_path, given, resume=True) as learner:
            until(lambda: producer.status().epoch > epoch, "the resumed learner")
            until(lambda: "replay was read again" in caplog.text, "replay")
            learner.drain()
    resumed = newest(tmp_path)
    for name in ("replay/entries", "replay/priorities", "replay/generator"):
        assert torch.equal(resumed.tensors[name], before.tensors[name]), name
