"""An evaluator gives way while it starts, and takes its share of the cores while it measures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.commands.service_commands import EVALUATOR_NICENESS
from tests.support.run.harness import trainings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a niceness for each thread is Linux's")

TELLS: Final = """
import os, pathlib, sys, threading, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Tells(CartPoleEnv):
    def step(self, action):
        role = "evaluation" if "evaluation" in sys.argv else "rollout"
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        (pathlib.Path(os.environ["TOLD"]) / f"{role}-{niceness}").touch()
        return super().step(action)
gymnasium.register("Tells-v0", Tells, max_episode_steps=50, reward_threshold=10)
"""
"""Leaves a file for each niceness with which a role steps it."""
STARTS: Final = """
import json, os, sys, threading
class Told:
    def find_spec(self, name, path=None, target=None):
        if name == "penstock.actor.process":
            print(json.dumps(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Told())
from penstock.launch.cli.app import app
app(["actor", "--broker", "127.0.0.1:1", "--role", sys.argv[1]])
"""
"""Says with which niceness a role loads what an actor is made of."""


def test_an_evaluation_has_the_priority_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "telling.py").write_text(TELLS)
    told = tmp_path / "told"
    told.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    )
    monkeypatch.setenv("TOLD", str(told))
    with trainings(tmp_path / "run") as start:
        training = start("telling:Tells-v0", "--set", 'actor.allow_modules=["telling"]')
        code, _, err = training.end()
    assert code == 0, err
    assert training.summary()["solved"]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {path.name for path in told.iterdir()} == {f"evaluation-{ours}", f"rollout-{ours}"}


@pytest.mark.parametrize(("role", "lower"), [("rollout", 0), ("evaluation", EVALUATOR_NICENESS)])
def test_a_start_gives_way_to_who_learns(role: str, lower: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS, role], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == min(os.getpriority(os.PRIO_PROCESS, 0) + lower, 19)
