"""Training from Python: a real run that finishes, one that is stopped, one that cannot begin, a dry run."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.training import TrainingConfig, TrainingFailed, estimate, resume, start

PATIENCE_S: Final = 150.0


def config(folder: Path, **learner: Any) -> TrainingConfig:
    settings = {
        "actor": {"count": 1},
        "algorithm": {"batch_steps": 512},
        "learner": {"stop_at_target": False} | learner,
        "evaluation": {"episodes": 2},
    }
    return TrainingConfig("CartPole-v1", settings=settings, run_dir=folder / "run")


def test_a_run_is_started_waited_for_and_told(tmp_path: Path) -> None:
    job = start(config(tmp_path, total_updates=2, total_steps=100_000))
    with pytest.raises(TimeoutError):
        job.result(timeout_s=0)
    result = job.result(PATIENCE_S)
    assert (result.updates, result.interrupted, result.run_dir) == (2, False, tmp_path / "run")
    assert result.env_steps == result.summary["env_steps"]
    assert result.env_steps
    assert (tmp_path / "run" / "summary.json").exists()
    assert not job.is_running


def test_a_run_that_is_stopped_says_so_and_goes_on(tmp_path: Path) -> None:
    job = start(config(tmp_path, total_steps=10**9, total_updates=150))
    lines = tmp_path / "run" / "metrics.jsonl"
    for _ in range(int(PATIENCE_S / 0.2)):
        if lines.exists() and lines.stat().st_size:
            break
        with pytest.raises(TimeoutError):
            job.result(timeout_s=0.2)
    job.stop()
    stopped = job.result(PATIENCE_S)
    assert stopped.interrupted
    assert stopped.updates is not None
    assert stopped.updates < 150
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    result = resume(tmp_path / "run").result(PATIENCE_S)
    assert (result.interrupted, result.updates, result.run_dir) == (False, 150, tmp_path / "run")


def test_a_run_that_cannot_begin_says_why(tmp_path: Path) -> None:
    wrong = TrainingConfig("No-such-environment-v0", run_dir=tmp_path / "run")
    with pytest.raises(TrainingFailed, match="No-such-environment-v0"):
        start(wrong).result(PATIENCE_S)
    with pytest.raises(TrainingFailed, match="unheard"):
        estimate(TrainingConfig("CartPole-v1", settings={"unheard": {"of": 1}}))


def test_nothing_of_a_learner_is_loaded() -> None:
    code = "import sys, penstock.training; print(sorted(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for module in ("torch", "grpc", "penstock.launch", "penstock.learner", "gymnasium"):
        assert f"'{module}'" not in told
