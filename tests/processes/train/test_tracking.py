"""A real run that writes to its trackers as well: they hold what `metrics.jsonl` holds."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.observers.wandb_file import history
from tests.support.run.harness import PATIENCE_S, Training, eventually

tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytest.importorskip("wandb")


def test_both_trackers_hold_the_lines_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    training = Training(
        tmp_path / "run", "CartPole-v1", "--total-steps", "20000", "--json",
        "--set", 'metrics.trackers=["tensorboard", "wandb"]', "--set", "metrics.wandb_mode=offline",
    )  # fmt: skip
    code, _, err = training.end()
    assert code == 0, err
    lines = [json.loads(line) for line in (training.run_dir / "metrics.jsonl").read_text().splitlines()]
    reader = tensorboard.EventAccumulator(str(training.run_dir / "tensorboard"))
    reader.Reload()
    for name in ("updates", "mean_return", "entropy"):
        written = [
            (row["env_steps"], float(np.float32(row[name]))) for row in lines if row.get(name) is not None
        ]
        assert [(event.step, event.value) for event in reader.Scalars(name)] == written, name
    (file,) = (training.run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    eventually(lambda: history(file) != [], "rows of wandb", PATIENCE_S)
    known = {(row["env_steps"], row["updates"]) for row in lines}
    assert {(row["env_steps"], row["updates"]) for row in history(file)} <= known
    assert "a tracker did not take a line" not in (training.run_dir / "logs" / "learner.log").read_text()
