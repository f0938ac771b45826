"""A first start: a fresh clone, a home without caches, or none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
START_S: Final = 240
RUN: Final = ("train", "CartPole-v1", "--run-dir", "runs/first", "--actors", "1", "--total-steps", "4000")
ANYWAY: Final = ("--set", "learner.stop_at_target=false", "--set", "algorithm.batch_steps=512")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a newcomer has: the committed files alone, in a folder whose name is not plain."""
    folder = tmp_path / "Räume und mehr" / "penstock"
    folder.parent.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True, timeout=60)
    return folder


def start(clone: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """`penstock train` of the clone's own code, with an environment that knows no caches of this machine."""
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "PYTHONPATH": str(clone)}
    command = [sys.executable, "-m", "launch.cli", *RUN, *ANYWAY]
    return subprocess.run(
        command, cwd=clone, env=known, capture_output=True, text=True, check=False, timeout=START_S
    )


def check(clone: Path, done: subprocess.CompletedProcess[str]) -> None:
    """It trained and drew its curve, and said nothing that looks like a fault."""
    assert done.returncode in {0, 3}, done.stderr
    for noise in ("Traceback", "Logging error", "Permission denied", "No such file"):
        assert noise not in done.stderr + done.stdout
    summary = json.loads((clone / "runs" / "first" / "summary.json").read_text())
    assert summary["env_steps"] >= 4000
    assert summary.get("failure") is None
    assert (clone / "runs" / "first" / "learning-curve.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["home", pytest.param("Zuhause mit Ümlaut", marks=pytest.mark.slow)])
def test_a_first_start_with_an_empty_home(clone: Path, tmp_path: Path, name: str) -> None:
    """Nothing of matplotlib, torch or numba is there yet."""
    home = tmp_path / name
    home.mkdir()
    check(clone, start(clone, home))


@pytest.mark.slow
def test_a_first_start_with_a_home_that_is_not_there(clone: Path, tmp_path: Path) -> None:
    """As of a service's user; nobody makes it either."""
    home = tmp_path / "absent"
    check(clone, start(clone, home))
