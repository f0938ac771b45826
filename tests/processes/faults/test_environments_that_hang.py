"""Environments that hang now and then do not keep a run from its goal."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.support.run.harness import trainings

ACTORS: Final = 4
PATIENCE_S: Final = 2400.0
HANGS: Final = """
import random, sys, threading, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Hangs(CartPoleEnv):
    def step(self, action):
        if "evaluation" not in sys.argv and random.random() < 0.001:
            threading.Event().wait()
        return super().step(action)
gymnasium.register("Hangs-v0", Hangs, max_episode_steps=500, reward_threshold=475)
"""


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules of the folder are found here and by every process that is started meanwhile."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.mark.promise("run-solved-whose-environments")
@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_run_whose_environments_hang_once_in_a_thousand_steps_solves(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGS)
    run_dir = tmp_path / "run"
    with importable(tmp_path), trainings(run_dir) as start:
        training = start(
            "hanging:Hangs-v0", "--actors", str(ACTORS), "--seed", "1",
            "--set", 'actor.allow_modules=["hanging"]', "--set", "actor.stall_timeout_s=1",
        )  # fmt: skip
        code, _, err = training.end(PATIENCE_S)
    assert code == 0, err
    summary = training.summary()
    assert summary["solved"]
    assert summary["ledger"]["balanced"]
    restarts = [one["restarts"] for one in summary["processes"] if one["role"] == "actor"]
    assert len(restarts) == ACTORS
    assert all(restarts)
