"""`penstock train` solves CartPole-v1 by separate processes before a real Redis."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.training import PATIENCE_S, Training, is_alive, trainings


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder, as on a machine where nothing has been drawn before."""
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    with trainings(tmp_path / "run") as started:
        yield started


@pytest.mark.promise("acknowledged-fragment-trained-dropped")
def test_cartpole_is_solved_by_separate_processes_and_the_books_balance(
    start: Callable[..., Training],
) -> None:
    training = start("CartPole-v1", "--seed", "1", "--json")
    code, out, err = training.end()
    assert code == 0, err
    assert "Logging error" not in err
    summary = json.loads(out)
    assert summary == training.summary()
    assert summary["solved"]
    assert summary["evaluation"]["mean"] >= 475
    assert summary["evaluation"]["episodes"] == 100
    solved = summary["solved_at"]
    assert solved["version"] == summary["evaluation"]["version"] == summary["policy_version"]
    assert (solved["seconds"], solved["env_steps"]) < (summary["training_seconds"], summary["env_steps"])
    whole = summary["env_steps"] / summary["env_steps_per_second"]
    assert summary["training_seconds"] == pytest.approx(whole, abs=0.1)
    assert summary["ledger"]["balanced"]
    assert summary["env_steps"] <= 160_000
    assert {one["role"] for one in summary["processes"]} >= {
        "redis",
        "broker",
        "learner",
        "actor",
        "evaluator",
    }
    assert len({one["pid"] for one in summary["processes"]}) == len(summary["processes"])
    for name in (
        "config.toml",
        "learning-curve.png",
        "metrics.jsonl",
        "lineage.jsonl",
        "endpoints.json",
        "targets.json",
    ):
        assert (training.run_dir / name).stat().st_size > 0
    assert not any(is_alive(pid) for pid in training.pids().values())
    reply = subprocess.run(
        penstock("evaluate", str(training.run_dir), "--episodes", "20", "--json"),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert json.loads(reply.stdout)["mean"] >= 475
