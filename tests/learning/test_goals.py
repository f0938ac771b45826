"""Goals are learned to within 5% of the optimum by value iteration, beside rules that learn nothing.

`penstock train penstock/recipes/goals.toml` as processes, with PPO and DQN; what the run left is then played
by `penstock evaluate` on seeds of its own, so that the evaluation which ended the run does not judge it.
"""

import json
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Final

import gymnasium as gym
import numpy as np
import pytest

from penstock.launch.run.supervisor import penstock
from penstock.workloads.goals.host import GoalReward
from tests.support.run.harness import Training
from tests.support.serving.goals_run import optimum

RECIPE: Final = Path(__file__).resolve().parents[2] / "penstock" / "recipes" / "goals.toml"
STEPS: Final = 50
EPISODES: Final = 600
"""Their mean is known to ±0.2 (one standard error)."""
FRESH_SEED: Final = 1_000_000
ENOUGH: Final = 0.95
WITHIN_S: Final = 1200.0
NUMBERS: Final = {
    "ppo": ("learner.total_steps=200000",),
    "dqn": ("learner.total_steps=110000",),
}


def best() -> float:
    """The mean return of the best policy there is."""
    return optimum(STEPS, GoalReward()).value


def learned(algorithm: str, seed: int, folder: Path, *settings: str) -> float:
    """The mean return of what a run has learned, over episodes that it has not seen."""
    words = [word for one in (f"algorithm.name={algorithm}", *settings) for word in ("--set", one)]
    training = Training(folder, str(RECIPE), "--seed", str(seed), *words)
    code, _, err = training.end(WITHIN_S)
    assert code == 0, err
    assert training.summary()["ledger"]["balanced"]
    command = penstock(
        "evaluate", str(folder), "--episodes", str(EPISODES), "--seed", str(FRESH_SEED), "--json"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["mean"])


def rule(*actions: int) -> float:
    """The mean return of a rule that draws from these actions, whatever it sees."""
    environment, random = gym.make("penstock.workloads.goals.tasks:Goals-v0"), np.random.default_rng(0)
    returns = []
    for seed in range(200):
        environment.reset(seed=seed)
        returns.append(
            sum(float(environment.step(np.int64(random.choice(actions)))[1]) for _ in range(STEPS))
        )
    return fmean(returns)


def test_goals_are_learned(tmp_path: Path) -> None:
    assert max(rule(*range(11)), rule(1), rule(0)) < 0
    found = learned("ppo", 0, tmp_path / "run", "learner.total_steps=120000")
    assert found >= ENOUGH * best()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("algorithm", NUMBERS)
def test_goals_are_learned_from_every_seed(algorithm: str, seed: int, tmp_path: Path) -> None:
    settings = ("learner.stop_at_target=false", *NUMBERS[algorithm])
    found = learned(algorithm, seed, tmp_path / "run", *settings)
    print(f"{algorithm} seed {seed}: {found:.2f} of {best():.2f}, {found / best():.3f}")
    assert found >= ENOUGH * best()
