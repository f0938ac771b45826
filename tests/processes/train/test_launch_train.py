"""`penstock train` end to end: real processes, real Redis, CartPole-v1."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.run.child_process import penstock
from tests.support.run.training import GONE_S, PATIENCE_S, Training, is_alive, wait_until_gone

LONG = ("--actors", "2", "--total-steps", "100000000", "--set", "learner.stop_at_target=false")
OFTEN = ("--set", "learner.checkpoint_interval_s=1")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder; nothing of them is left afterwards."""
    trainings: list[Training] = []

    def start(*arguments: str) -> Training:
        trainings.append(Training(tmp_path / "run", *arguments))
        return trainings[-1]

    yield start
    for training in trainings:
        training.process.kill()
        training.process.communicate()
    if trainings:
        wait_until_gone(trainings[-1])


@pytest.mark.parametrize("name", ["impala", "reinforce"])
def test_the_algorithm_that_is_named_learns_and_the_books_balance(
    name: str, start: Callable[..., Training]
) -> None:
    """One gradient step per batch, through every process; its figures are in the lines, its name in the configuration."""
    training = start(
        "CartPole-v1", "--seed", "1", "--json", "--total-steps", "8000", "--set", f"algorithm.name={name}",
        "--set", "evaluation.episodes=2", "--set", "learner.stop_at_target=false",
    )  # fmt: skip
    code, out, err = training.end()
    assert code == 0, err
    summary = json.loads(out)
    assert summary["ledger"]["balanced"]
    assert summary["updates"] >= 8000 // 600
    assert summary["policy_version"] > 1
    assert f'name = "{name}"' in (training.run_dir / "config.toml").read_text()
    last = json.loads((training.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"policy_loss", "entropy_coefficient", "learning_rate"} <= last.keys()
    assert "clip_fraction" not in last


def test_cartpole_is_solved_by_separate_processes_and_the_books_balance(
    start: Callable[..., Training],
) -> None:
    """The main promise: exit 0, solved, four roles, summary, curve and final policy on disk."""
    training = start("CartPole-v1", "--seed", "1", "--json")
    code, out, err = training.end()
    assert code == 0, err
    summary = json.loads(out)
    assert summary == training.summary()
    assert summary["solved"]
    assert summary["evaluation"]["mean"] >= 475
    assert summary["evaluation"]["episodes"] == 100
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


def test_ctrl_c_drains_within_15_seconds_and_resume_goes_on(start: Callable[..., Training]) -> None:
    """Exit 130 with a summary; the resumed run has the same name and continues the same count of steps."""
    first = start("CartPole-v1", *LONG)
    first.until_steps(10_000)
    status = subprocess.run(
        penstock("status", str(first.run_dir), "--json"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(status.stdout)["desired"] == "RUN_STATE_RUNNING"
    began = time.monotonic()
    first.process.send_signal(signal.SIGINT)
    code, out, _ = first.end()
    assert code == 130
    assert time.monotonic() - began < 15
    assert "interrupted" in out
    assert not any(is_alive(pid) for pid in first.pids().values())
    stopped = first.summary()
    assert stopped["interrupted"]
    assert stopped["ledger"]["balanced"]

    second = start("--resume")
    assert second.steps() == stopped["env_steps"]
    second.until_steps(10_000)
    second.process.send_signal(signal.SIGTERM)
    code, _, err = second.end()
    assert code == 130, err
    resumed = second.summary()
    assert resumed["run"] == stopped["run"]
    assert resumed["env_steps"] >= stopped["env_steps"] + 10_000
    assert resumed["ledger"]["balanced"]
    assert "stale" not in {reason for reason, count in resumed["ledger"]["dropped"].items() if count}


def test_a_killed_launcher_leaves_nothing_running(start: Callable[..., Training]) -> None:
    """`kill -9`: the children see their lifeline close, checkpoint and go; the run can be resumed."""
    training = start("CartPole-v1", *LONG)
    training.until_steps(5_000)
    training.process.kill()
    assert wait_until_gone(training) < GONE_S
    assert "checkpoint committed" in (training.run_dir / "logs" / "learner.log").read_text()


def test_a_launcher_killed_while_services_start_leaves_nothing_running(
    start: Callable[..., Training],
) -> None:
    """Also before anybody has announced anything but Redis."""
    training = start("CartPole-v1", *LONG)
    training.until(lambda: (training.run_dir / "endpoints" / "redis.json").exists())
    group = children(training.process.pid)
    training.process.kill()
    began = time.monotonic()
    pause = threading.Event()
    while any(is_alive(pid) for pid in group):
        assert time.monotonic() - began < GONE_S
        pause.wait(0.05)


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
def test_a_run_survives_the_death_of_each_of_its_parts(start: Callable[..., Training]) -> None:
    """`kill -9` of an actor, the broker, the learner and Redis: it still solves and the books balance."""
    training = start(
        "CartPole-v1", "--total-steps", "400000", "--set", "learner.stop_at_target=false", *OFTEN
    )
    steps = 20_000
    for name in ("actor-0", "broker", "learner", "redis"):
        training.until_steps(steps)
        steps = training.steps() + 30_000
        os.kill(training.pids()[name], signal.SIGKILL)
    code, out, err = training.end()
    assert code == 0, err
    summary = training.summary()
    assert summary["solved"]
    assert summary["ledger"]["balanced"]
    restarts = {one["role"]: 0 for one in summary["processes"]}
    for one in summary["processes"]:
        restarts[one["role"]] += one["restarts"]
    assert {role: restarts[role] for role in ("actor", "broker", "learner", "redis")} == {
        "actor": 1, "broker": 1, "learner": 1, "redis": 1,
    }  # fmt: skip
    assert "learner died (signal 9), restarting" in out


def test_what_the_policy_cannot_handle_ends_with_exit_2(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    """The learner finds it; the launcher passes on its words and its exit code."""
    module = tmp_path / "strange_environments.py"
    module.write_text(
        "import gymnasium\n"
        "class Strange(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Text(5)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): return 'a', {}\n"
        "    def step(self, action): return 'a', 0.0, True, False, {}\n"
        "gymnasium.register('Strange-v0', Strange, reward_threshold=1)\n"
    )
    process = subprocess.run(
        penstock("train", "strange_environments:Strange-v0", "--run-dir", str(tmp_path / "run")),
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    assert "observation_space" in process.stderr.splitlines()[-1]
