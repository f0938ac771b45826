"""What `learner.json` says of the time, and of the version that solved the task."""

import json
import threading
from pathlib import Path

import pytest

import penstock.learner.learner
import penstock.learner.recorder
from penstock.learner.publish.kept_versions import FinalPolicy, read_final, write_final
from penstock.protocol.messages import Role
from penstock.runtime import metrics
from tests.support.run.learner_run import BATCH, PATIENCE_S, LearnerThread, Producer, settings, until


def test_training_ends_with_the_last_update(redis_url: str, tmp_path: Path) -> None:
    waited_s = 2
    made = settings(evaluation={"timeout_s": waited_s, "episodes": 2})
    with LearnerThread(redis_url, tmp_path, made) as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], lambda: learner.ended)
        learner.finish()
    account = json.loads((tmp_path / "learner.json").read_text())
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["training_seconds"] - account["training_seconds"] >= waited_s
    rate = account["env_steps"] / account["training_seconds"]
    assert account["env_steps_per_second"] == pytest.approx(rate, rel=0.01)
    with LearnerThread(redis_url, tmp_path, made, resume=True) as learner:
        learner.finish()
    again = json.loads((tmp_path / "learner.json").read_text())
    assert again["training_seconds"] == account["training_seconds"], "a checkpoint counts what is no training"


def test_a_result_that_comes_after_the_end_changes_nothing(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updating, ending = Gate(), Gate()
    updates = 0

    def hold(name: str, _sequence: int = 0) -> None:
        nonlocal updates
        updates += name == "update.after"
        if name == "update.after" and updates == 4:
            updating.hold()

    def write(run_dir: Path, final: FinalPolicy) -> None:
        ending.hold()
        write_final(run_dir, final)

    monkeypatch.setattr(penstock.learner.learner, "failpoint", hold)
    monkeypatch.setattr(penstock.learner.recorder, "write_final", write)
    made = settings(
        learner={
            "total_steps": 10**9,
            "checkpoint_interval_s": 3600,
            "stop_at_target": True,
            "target_return": 5.0,
        },
        evaluation={"episodes": 2, "interval_steps": 2 * BATCH},
    )
    with LearnerThread(redis_url, tmp_path, made) as running, Producer(redis_url) as producer:
        judge, rollout = producer.open("judge", role=Role.EVALUATION), producer.open()
        with updating, ending:
            producer.drive([rollout], updating.is_reached)
            first = producer.evaluate_version(judge)
            producer.report(judge, [6.0, 6.0], version=first, evaluation=True)
            until(lambda: producer.evaluate_version(judge) == 0, "the target to be reached")
            updating.go_on()
            until(ending.is_reached, "the end")
            second = producer.evaluate_version(judge)
            assert second > first > 0
            producer.report(judge, [7.0, 7.0], version=second, evaluation=True)
            producer.report(rollout, [123.0])
            until(lambda: metrics.MEAN_RETURN._value.get() == 123.0, "all reports to be read")
        told = running.finish()
    assert told["ending"] == "target"
    versions = told["solved_at"]["version"], told["evaluation"]["version"]
    assert versions == (first, first)
    assert read_final(tmp_path).version == told["policy_version"] == first


class Gate:
    """Holds the learner's thread where it is reached, until the test goes on or leaves."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_error: object) -> None:
        self._open.set()

    def hold(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE_S)

    def is_reached(self) -> bool:
        return self._reached.is_set()

    def go_on(self) -> None:
        self._open.set()
