"""Services of a run that are copies of one process: as independent as programs, and replaced by them."""

import os
import signal
import sys
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import LONG, children, trainings

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

TELLS: Final = """
import multiprocessing, os, pathlib, sys, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Tells(CartPoleEnv):
    def reset(self, **options):
        if multiprocessing.parent_process():
            loaded = sorted({"penstock.launch", "penstock.runtime.lifecycle"} & sys.modules.keys())
            (pathlib.Path(os.environ["TOLD"]) / "+".join(["loaded", *loaded])).touch()
        return super().reset(**options)
gymnasium.register("Tells-v0", Tells, max_episode_steps=50, reward_threshold=10)
"""
"""Leaves a file for what a process of an environment has loaded of the actor that started it."""


def forking(launcher: int) -> list[int]:
    names = (b"penstock.launch.run.fork_server", b"penstock fork server")
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(launcher)}
    return [pid for pid, said in words.items() if any(name in said for name in names)]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for what environments tell; their modules are `drawing` and `telling`."""
    (tmp_path / "drawing.py").write_text(DRAWS)
    (tmp_path / "telling.py").write_text(TELLS)
    folder = tmp_path / "told"
    folder.mkdir()
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    )
    monkeypatch.setenv("TOLD", str(folder))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_actors_draw_different_numbers(tmp_path: Path, told: Path) -> None:
    with trainings(tmp_path / "run") as start:
        code, _, err = start(
            "drawing:Draws-v0", "--actors", "2", "--set", 'actor.allow_modules=["drawing"]'
        ).end()
    assert code == 0, err
    for generator in ("numpy", "python"):
        drawn = [path.name.split("-")[1] for path in told.glob(f"{generator}-*")]
        assert len(drawn) >= 3, "two actors and the evaluator"
        assert len(set(drawn)) == len(drawn)


def test_processes_of_environments_load_nothing_of_the_actor(tmp_path: Path, told: Path) -> None:
    allowed = ("--set", 'actor.allow_modules=["telling"]', "--set", "environment.vectorise=async")
    with trainings(tmp_path / "run") as start:
        code, _, err = start("telling:Tells-v0", "--actors", "1", "--total-steps", "1000", *allowed).end()
    assert code == 0, err
    assert [path.name for path in told.iterdir()] == ["loaded"]


def test_a_run_outlives_its_fork_server(tmp_path: Path) -> None:
    with trainings(tmp_path / "run") as start:
        training = start("CartPole-v1", *LONG)
        training.until_steps(2_000)
        before = training.pids()
        (server,) = forking(training.process.pid)
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


def test_the_ranks_of_a_learner_are_learners(tmp_path: Path) -> None:
    with trainings(tmp_path / "run") as start:
        code, _, err = start("CartPole-v1", "--actors", "1", "--ranks", "2", "--total-steps", "2000").end()
        assert code == 0, err


def test_who_ends_a_run_does_not_wait_for_a_fork_server_that_hangs(tmp_path: Path) -> None:
    with trainings(tmp_path / "run") as start:
        training = start("CartPole-v1", *LONG)
        log = training.run_dir / "logs" / "launcher.log"
        while not (servers := forking(training.process.pid)):
            assert training.process.poll() is None
        os.kill(servers[0], signal.SIGSTOP)
        while not log.exists() or "everything of this run" not in log.read_text():
            assert training.process.poll() is None
        training.process.send_signal(signal.SIGINT)
        code, _, err = training.end()
        assert code == 130, err
        assert "timed out" not in log.read_text()


def test_a_launcher_whose_parent_ignores_ends_of_children_sees_those_of_its_own(tmp_path: Path) -> None:
    with trainings(tmp_path / "run") as start:
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            training = start("CartPole-v1", "--actors", "1", "--total-steps", "2000")
        finally:
            signal.signal(signal.SIGCHLD, before)
        code, _, err = training.end()
        assert code == 0, err
        assert "fork server is gone" not in (training.run_dir / "logs" / "launcher.log").read_text()
