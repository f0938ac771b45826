"""Services of a run that are copies of one process: as independent as programs, and replaced by them."""

import os
import signal
import sys
from pathlib import Path
from typing import Final

import pytest

from launch.run.child_process import penstock
from tests.processes.train.test_launch_train import children
from tests.support.run.training import LONG, trainings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="who is whose child is read from /proc")

DRAWS: Final = """
import os, pathlib, random, gymnasium, numpy
from gymnasium.envs.classic_control import CartPoleEnv
class Draws(CartPoleEnv):
    drawn = False
    def reset(self, **options):
        if not Draws.drawn:
            Draws.drawn = True
            for name, number in (("numpy", numpy.random.random()), ("python", random.random())):
                (pathlib.Path(os.environ["TOLD"]) / f"{name}-{number}-{os.getpid()}").touch()
        return super().reset(**options)
gymnasium.register("Draws-v0", Draws, max_episode_steps=50, reward_threshold=10)
"""
"""Leaves a file for the first number that each process draws from a generator that all of it shares."""


def test_actors_draw_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that use numpy's or Python's own generator would play the same episodes everywhere."""
    (tmp_path / "drawing.py").write_text(DRAWS)
    told = tmp_path / "told"
    told.mkdir()
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    )
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.syspath_prepend(tmp_path)
    with trainings(tmp_path / "run") as start:
        code, _, err = start(
            "drawing:Draws-v0", "--actors", "2", "--set", 'actor.allow_modules=["drawing"]'
        ).end()
    assert code == 0, err
    for generator in ("numpy", "python"):
        drawn = [path.name.split("-")[1] for path in told.glob(f"{generator}-*")]
        assert len(drawn) >= 3, "two actors and the evaluator"
        assert len(set(drawn)) == len(drawn)


def test_a_run_outlives_its_fork_server(tmp_path: Path) -> None:
    """A service that dies after it is started as a program, and the run goes on."""
    with trainings(tmp_path / "run") as start:
        training = start("CartPole-v1", *LONG)
        training.until_steps(2_000)
        before = training.pids()
        (server,) = [
            pid
            for pid in children(training.process.pid)
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"penstock fork server")
        ]
        os.kill(server, signal.SIGKILL)
        os.kill(before["actor-0"], signal.SIGKILL)
        training.until(lambda: training.pids().get("actor-0") not in {None, before["actor-0"]})
        words = Path(f"/proc/{training.pids()['actor-0']}/cmdline").read_bytes().split(b"\0")
        assert [word.decode() for word in words[:5]] == list(penstock("actor"))
        training.until_steps(training.steps() - training.began_steps + 2_000)
        training.process.send_signal(signal.SIGINT)
        code, _, err = training.end()
        assert code == 130, err
        assert training.summary()["ledger"]["balanced"]
