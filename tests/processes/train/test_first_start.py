"""A first start: a fresh clone, a home without caches, one that is only read, or none; not as root."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

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


def start(clone: Path, home: Path, *user: str) -> subprocess.CompletedProcess[str]:
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
def test_a_first_start_with_an_empty_home(clone: Path, tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    check(clone, start(clone, home))


@pytest.mark.slow
def test_a_first_start_with_a_home_that_is_not_there(clone: Path, tmp_path: Path) -> None:
    home = tmp_path / "absent"
    check(clone, start(clone, home))


def test_a_first_start_of_a_user_without_rights_and_with_a_home_that_is_only_read(
    own_clone: Path, short_folder: Path
) -> None:
    home = short_folder / "home"
    home.mkdir(mode=0o555)
    user = as_nobody()
    tried = subprocess.run([*user, "mkdir", str(home / "written")], capture_output=True, check=False)
    assert tried.returncode != 0
    check(own_clone, start(own_clone, home, *user))
    assert list(home.iterdir()) == []
