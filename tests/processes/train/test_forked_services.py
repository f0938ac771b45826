"""What the processes of a run are: independent copies of one process, which load what their work needs."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.commands.service_commands import EVALUATOR_NICENESS
from penstock.launch.run.supervisor import penstock
from tests.support.run import harness
from tests.support.run.harness import LONG, Training, children

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="/proc and the niceness of a thread are Linux's"
)

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
def told(importable: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what environments tell; their modules are `drawing`, `telling` and `stepping`."""
    for name, text in (("drawing", DRAWS), ("telling", TELLS), ("stepping", STEPS)):
        (importable / f"{name}.py").write_text(text)
    folder = importable / "told"
    folder.mkdir()
    monkeypatch.setenv("TOLD", str(folder))
    return folder


def test_actors_draw_different_numbers(start: Callable[..., Training], told: Path) -> None:
    code, _, err = start(
        "drawing:Draws-v0", "--actors", "2", "--set", 'actor.allow_modules=["drawing"]'
    ).end()
    assert code == 0, err
    for generator in ("numpy", "python"):
        drawn = [path.name.split("-")[1] for path in told.glob(f"{generator}-*")]
        assert len(drawn) >= 3, "two actors and the evaluator"
        assert len(set(drawn)) == len(drawn)


def test_processes_of_environments_load_nothing_of_the_actor(
    start: Callable[..., Training], told: Path
) -> None:
    allowed = ("--set", 'actor.allow_modules=["telling"]', "--set", "environment.vectorise=async")
    code, _, err = start("telling:Tells-v0", "--actors", "1", "--total-steps", "1000", *allowed).end()
    assert code == 0, err
    assert [path.name for path in told.iterdir()] == ["loaded"]


def test_a_run_outlives_its_fork_server(start: Callable[..., Training]) -> None:
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


def test_the_ranks_of_a_learner_are_learners(start: Callable[..., Training]) -> None:
    code, _, err = start("CartPole-v1", "--actors", "1", "--ranks", "2", "--total-steps", "2000").end()
    assert code == 0, err


def test_ending_a_run_does_not_wait_for_a_hanging_fork_server(start: Callable[..., Training]) -> None:
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


def test_a_launcher_whose_parent_ignores_sigchld_sees_its_children_end(
    start: Callable[..., Training],
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        training = start("CartPole-v1", "--actors", "1", "--total-steps", "2000")
    finally:
        signal.signal(signal.SIGCHLD, before)
    code, _, err = training.end()
    assert code == 0, err
    assert "fork server is gone" not in (training.run_dir / "logs" / "launcher.log").read_text()


STEPS: Final = """
import os, pathlib, sys, threading, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Steps(CartPoleEnv):
    def step(self, action):
        role = "evaluation" if "evaluation" in sys.argv else "rollout"
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        (pathlib.Path(os.environ["TOLD"]) / f"{role}-{niceness}").touch()
        return super().step(action)
gymnasium.register("Steps-v0", Steps, max_episode_steps=50, reward_threshold=10)
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


def test_an_evaluation_has_the_priority_of_the_run(start: Callable[..., Training], told: Path) -> None:
    training = start("stepping:Steps-v0", "--set", 'actor.allow_modules=["stepping"]')
    code, _, err = training.end()
    assert code == 0, err
    assert training.summary()["solved"]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {path.name for path in told.iterdir()} == {f"evaluation-{ours}", f"rollout-{ours}"}


@pytest.mark.parametrize(("role", "lower"), [("rollout", 0), ("evaluation", EVALUATOR_NICENESS)])
def test_a_process_that_starts_gives_way_to_the_learner(role: str, lower: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS, role], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == min(os.getpriority(os.PRIO_PROCESS, 0) + lower, 19)


TORCH, GRPC = "libtorch", "cygrpc"
EVALUATED: Final = ("--set", "evaluation.interval_steps=2000", "--set", "evaluation.episodes=2")
LOADED: Final = {
    "launcher": set(),
    "redis": {GRPC},  # as a copy of the fork server: the pages are the others'
    "broker": {GRPC},
    "learner": {GRPC, TORCH},
    "actor-0": {GRPC},
    "actor-1": {GRPC},
    "evaluator": {GRPC},
}


@pytest.mark.parametrize(
    ("environment", "policy"),
    [("CartPole-v1", ()), ("Pendulum-v1", ("--set", "policy.normalise_observations=true"))],
)
def test_the_learner_of_a_small_network_is_the_only_one_with_torch(
    environment: str, policy: tuple[str, ...], start: Callable[..., Training]
) -> None:
    training = start(environment, *LONG, *policy, *EVALUATED)
    training.until_steps(4_000)
    training.until(lambda: "evaluated" in (training.run_dir / "logs" / "evaluator.log").read_text())
    pids = {name: one["pid"] for name, one in training.endpoints().items()} | {
        "launcher": training.process.pid
    }
    mapped = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    assert {
        name: {library for library in (TORCH, GRPC) if library in text} for name, text in mapped.items()
    } == LOADED


TEXT_LINE: Final = re.compile(r"\d{4}-\d\d-\d\dT")
BARE: Final = {"actor", "broker", "gateway", "launch", "learner", "recipes", "workloads"}
OURS: Final = {"penstock.launch.run.run", "penstock.learner.learner"}


def test_logs_in_json_name_role_and_run_and_every_module_is_below_penstock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    words = ("--total-steps", "4096", "--set", "evaluation.episodes=4", "--set", "logs.format=json")
    with harness.run(tmp_path / "run", "CartPole-v1", "--json", *words) as training:
        code, _, said = training.end()
    assert code == 0, said
    run = training.summary()["run"]
    logs = {file.stem: file.read_text() for file in sorted((training.run_dir / "logs").glob("*.log"))}
    for role in ("actor", "broker", "learner", "launcher", "evaluator"):
        (text, *_) = (text.splitlines() for name, text in logs.items() if name.startswith(role))
        assert [line for line in text if TEXT_LINE.match(line)] == []
        lines = [json.loads(line) for line in text if line.startswith("{")]
        assert {(line["role"], line["run"]) for line in lines} == {(role, run)}
    told = "\n".join([said, *logs.values()])
    loaded = set(re.findall(r"^import time: .*\| +([\w.]+)$", told, flags=re.MULTILINE))
    assert loaded >= OURS
    assert {name.partition(".")[0] for name in loaded} & BARE == set()
