"""A game is learned from its ten by ten screen by separate processes, in seconds (Young and Tian 2019)."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actor.acting.stepper import Stepper
from penstock.config.settings import EnvironmentSection
from penstock.launch.run.supervisor import penstock
from penstock.workloads.control.environment import make, spaces
from tests.support.run.harness import PATIENCE_S

pytest.importorskip("minatar", reason="its games are the extra minatar")

GAME = "tests.support.experience.minatar_games:MinAtar/Breakout-v1"
LIMIT = 1000
SETTINGS: tuple[str, ...] = (
    f"environment.max_episode_steps={LIMIT}", "policy.hidden_sizes=[128]", "policy.shared_trunk=true",
    "policy.normalise_observations=false", "algorithm.batch_steps=2048", "algorithm.epochs=4",
    "algorithm.minibatches=8", "algorithm.learning_rate=1e-3", "algorithm.entropy_coefficient=0.01",
    "algorithm.scale_rewards=false", "evaluation.episodes=50", "evaluation.deterministic=false",
)  # fmt: skip


def random_returns(episodes: int) -> Any:
    section = EnvironmentSection(id=GAME, max_episode_steps=LIMIT)
    environment = make(section, episodes, 0)
    stepper = Stepper(environment, spaces(section)[0])
    stepper.reset(range(episodes))
    environment.action_space.seed(0)
    returns, is_played = np.zeros(episodes), np.ones(episodes, np.bool_)
    while is_played.any():
        stepped = stepper.step(environment.action_space.sample())
        returns += np.where(is_played, stepped.reward, 0.0)
        is_played &= ~(stepped.terminated | stepped.truncated)
    stepper.close()
    return returns


def test_breakout_is_learned_far_beyond_chance(tmp_path: Path) -> None:
    chance = random_returns(200)
    folder = tmp_path / "run"
    arguments = [part for setting in SETTINGS for part in ("--set", setting)]
    command = penstock(
        "train", GAME, "--run-dir", str(folder), "--actors", "1", "--seed", "1", "--total-steps", "100000",
        *arguments,
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"]["balanced"]
    learned = summary["evaluation"]["mean"] - 3 * summary["evaluation"]["std"] / 50**0.5
    assert learned > 3 * (chance.mean() + 3 * chance.std() / 200**0.5), (summary["evaluation"], chance.mean())
