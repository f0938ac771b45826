"""A first start, on a machine without caches or rights and from Python, and the records of trackers."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.training import TrainingConfig, TrainingFailed, estimate, lay_over, resume
from penstock.training import start as begin
from tests.support.run.harness import PATIENCE_S, Training, eventually
from tests.support.run.wandb_file import history

ROOT: Final = Path(__file__).resolve().parents[3]
START_S: Final = 240
RUN: Final = ("train", "CartPole-v1", "--run-dir", "runs/first", "--actors", "1", "--total-steps", "4000")
NOBODY: Final = 65534
ANYWAY: Final = ("--set", "learner.stop_at_target=false", "--set", "algorithm.batch_steps=512")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a newcomer has: the committed files alone, in a folder whose name is not plain."""
    folder = tmp_path / "Räume und mehr" / "penstock"
    folder.parent.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True, timeout=60)
    return folder


def train(clone: Path, home: Path, *user: str) -> subprocess.CompletedProcess[str]:
    """`penstock train` of the clone's own code, with an environment that knows no caches of this machine.

    user: what runs it as somebody else.
    """
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "PYTHONPATH": str(clone)}
    command = [*user, sys.executable, "-m", "penstock.launch.cli", *RUN, *ANYWAY]
    return subprocess.run(
        command, cwd=clone, env=known, capture_output=True, text=True, check=False, timeout=START_S
    )


@cache
def as_nobody() -> tuple[str, ...]:
    """What runs a command as a user without rights; nothing where this one has none.

    It may read everything, because the interpreter may lie in a home that root alone can enter.
    """
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root becomes somebody else by setpriv, which is absent")
    reading = (f"--{kept}=-all,+dac_read_search" for kept in ("inh-caps", "ambient-caps", "bounding-set"))
    words = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *reading)
    asks = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    tried = subprocess.run([*words, sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {tried.stderr.strip()}")
    return words


@pytest.fixture
def own_clone(short_folder: Path, clone: Path) -> Path:
    short_folder.chmod(0o711)
    moved = Path(shutil.move(clone, short_folder / "penstock"))
    if as_nobody():
        for path in (moved, *moved.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return moved


def check(clone: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode in {0, 3}, done.stderr
    for noise in ("Traceback", "Logging error", "Permission denied", "No such file"):
        assert noise not in done.stderr + done.stdout
    summary = json.loads((clone / "runs" / "first" / "summary.json").read_text())
    assert summary["env_steps"] >= 4000
    assert summary.get("failure") is None
    assert (clone / "runs" / "first" / "learning-curve.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["home", pytest.param("Zuhause mit Ümlaut", marks=pytest.mark.slow)])
def test_a_first_start_works_with_an_empty_home(clone: Path, tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    check(clone, train(clone, home))


@pytest.mark.slow
def test_a_first_start_works_without_a_home(clone: Path, tmp_path: Path) -> None:
    home = tmp_path / "absent"
    check(clone, train(clone, home))


def test_a_first_start_works_with_a_read_only_home(own_clone: Path, short_folder: Path) -> None:
    home = short_folder / "home"
    home.mkdir(mode=0o555)
    user = as_nobody()
    tried = subprocess.run([*user, "mkdir", str(home / "written")], capture_output=True, check=False)
    assert tried.returncode != 0
    check(own_clone, train(own_clone, home, *user))
    assert list(home.iterdir()) == []


def config(folder: Path, **learner: Any) -> TrainingConfig:
    settings = {
        "actor": {"count": 1},
        "algorithm": {"batch_steps": 512},
        "learner": {"stop_at_target": False} | learner,
        "evaluation": {"episodes": 2},
    }
    return TrainingConfig("CartPole-v1", settings=settings, run_dir=folder / "run")


def test_a_run_is_started_awaited_and_summarised(tmp_path: Path) -> None:
    job = begin(config(tmp_path, total_updates=2, total_steps=100_000))
    with pytest.raises(TimeoutError):
        job.result(timeout_s=0)
    result = job.result(PATIENCE_S)
    assert (result.updates, result.interrupted, result.run_dir) == (2, False, tmp_path / "run")
    assert result.env_steps == result.summary["env_steps"]
    assert result.env_steps
    assert (tmp_path / "run" / "summary.json").exists()
    assert not job.is_running


def test_a_run_that_is_stopped_says_so_and_continues(tmp_path: Path) -> None:
    job = begin(config(tmp_path, total_steps=10**9, total_updates=150))
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


def test_a_run_that_cannot_start_names_the_cause(tmp_path: Path) -> None:
    wrong = TrainingConfig("No-such-environment-v0", run_dir=tmp_path / "run")
    with pytest.raises(TrainingFailed, match="No-such-environment-v0"):
        begin(wrong).result(PATIENCE_S)
    with pytest.raises(TrainingFailed, match="unheard"):
        estimate(TrainingConfig("CartPole-v1", settings={"unheard": {"of": 1}}))


def test_settings_of_python_become_those_of_toml_or_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below: dict[str, Any] = {"learner": {"total_steps": 5, "total_updates": 1}, "environment": "one"}
    numbers = {"total_steps": np.int64(7), "total_updates": None, "lease_ttl_s": np.float32(0.5)}
    kwargs = {"table": np.eye(2), "file": tmp_path, "parts": [{"of": np.bool_(True), "none": None}]}
    lay_over(below, {"learner": numbers, "environment": {"kwargs": kwargs}})
    plain = {"table": [[1.0, 0.0], [0.0, 1.0]], "file": str(tmp_path), "parts": [{"of": True}]}
    assert below == {"learner": {"total_steps": 7, "lease_ttl_s": 0.5}, "environment": {"kwargs": plain}}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wrong: tuple[tuple[dict[Any, Any], str], ...] = (
        ({"learner": {"total_steps": object()}}, r"learner\.total_steps=<object"),
        (
            {"environment": {"kwargs": {"parts": [{"of": {1, 2}}]}}},
            r"environment\.kwargs\.parts\.of=\{1, 2\}",
        ),
        ({"policy": {"hidden_sizes": [None]}}, r"policy\.hidden_sizes=None"),
        ({"learner": {7: 1}}, r"learner\.7: is no name of a setting"),
    )
    for settings, words in wrong:
        with pytest.raises(TypeError, match=words):
            begin(TrainingConfig("CartPole-v1", settings=settings, run_dir=tmp_path / "run"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        resume(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_no_module_of_the_learner_is_loaded() -> None:
    code = "import sys, penstock.training; print(sorted(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for module in ("torch", "grpc", "penstock.launch", "penstock.learner", "gymnasium"):
        assert f"'{module}'" not in told


def test_both_trackers_hold_the_lines_of_a_run(
    start: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    training = start(
        "CartPole-v1", "--total-steps", "20000", "--json",
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
