"""What `learner.json` says of the time."""

import json
from pathlib import Path

import pytest

from tests.support.run.learner_run import LearnerThread, Producer, settings


def test_training_ends_with_the_last_update(redis_url: str, tmp_path: Path) -> None:
    """Waiting for the evaluation of the last weights, which nobody plays here, is not training."""
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
