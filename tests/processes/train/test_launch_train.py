"""`penstock train` end to end: real processes, real Redis, CartPole-v1."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import (
    GONE_S,
    LONG,
    PATIENCE_S,
    Training,
    children,
    is_alive,
    trainings,
    wait_until_gone,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder; nothing of them is left afterwards."""
    with trainings(tmp_path / "run") as started:
        yield started


@pytest.mark.parametrize("name", ["impala", "reinforce"])
def test_the_algorithm_that_is_named_learns_and_the_books_balance(
    name: str, start: Callable[..., Training]
) -> None:
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


@pytest.mark.promise("launcher-killed-leaves-nothing")
def test_a_killed_launcher_leaves_nothing_running(start: Callable[..., Training]) -> None:
    training = start("CartPole-v1", *LONG)
    training.until_steps(5_000)
    training.process.kill()
    assert wait_until_gone(training) < GONE_S
    assert "checkpoint committed" in (training.run_dir / "logs" / "learner.log").read_text()


def test_a_launcher_killed_while_services_start_leaves_nothing_running(
    start: Callable[..., Training],
) -> None:
    training = start("CartPole-v1", *LONG)
    training.until(lambda: (training.run_dir / "endpoints" / "redis.json").exists())
    group = children(training.process.pid)
    training.process.kill()
    began = time.monotonic()
    pause = threading.Event()
    while any(is_alive(pid) for pid in group):
        assert time.monotonic() - began < GONE_S
        pause.wait(0.05)


def test_what_the_policy_cannot_handle_ends_with_exit_2(
    start: Callable[..., Training], tmp_path: Path
) -> None:
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
