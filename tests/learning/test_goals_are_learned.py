"""Goals are learned to within 5% of the optimum by value iteration: in a run, within a day, from a log."""

import json
import random
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Final

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.launch.run.supervisor import penstock
from penstock.workloads.goals.host import GoalReward
from tests.support.run.harness import Training
from tests.support.serving.goals_run import optimum

RECIPE: Final = Path(__file__).resolve().parents[2] / "penstock" / "recipes" / "goals.toml"
STEPS: Final = 50
EPISODES: Final = 600
"""Their mean is known to ±0.2 (one standard error)."""
ENOUGH: Final = 0.95
WITHIN_S: Final = 1200.0


def learned(algorithm: str, seed: int, folder: Path, *settings: str) -> float:
    """The share of the optimum that the run earns, on seeds that its own evaluation has not judged."""
    words = [word for one in (f"algorithm.name={algorithm}", *settings) for word in ("--set", one)]
    Training(folder, str(RECIPE), "--seed", str(seed), *words).completed(WITHIN_S)
    command = penstock("evaluate", str(folder), "--episodes", str(EPISODES), "--seed", "1000000", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["mean"]) / optimum(STEPS, GoalReward()).value


def rule(*actions: int) -> float:
    environment, random = gym.make("penstock.workloads.goals.tasks:Goals-v0"), np.random.default_rng(0)
    returns = []
    for seed in range(200):
        environment.reset(seed=seed)
        steps = (environment.step(np.int64(random.choice(actions))) for _ in range(STEPS))
        returns.append(sum(float(step[1]) for step in steps))
    return fmean(returns)


def test_goals_are_learned(tmp_path: Path) -> None:
    assert max(rule(*range(11)), rule(1), rule(0)) < 0
    assert learned("ppo", 0, tmp_path / "run", "learner.total_steps=120000") >= ENOUGH


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("algorithm", "steps"), [("ppo", 200_000), ("dqn", 110_000)])
def test_goals_are_learned_from_every_seed(algorithm: str, steps: int, seed: int, tmp_path: Path) -> None:
    settings = ("learner.stop_at_target=false", f"learner.total_steps={steps}")
    share = learned(algorithm, seed, tmp_path / "run", *settings)
    print(f"{algorithm} seed {seed}: {share:.3f} of the best")
    assert share >= ENOUGH


DAY: Final = (
    "algorithm.batch_steps=256",
    "algorithm.minibatches=4",
    "algorithm.epochs=8",
    "algorithm.learning_rate=2e-3",
    "algorithm.learning_rate_schedule=constant",
    "actor.unroll_length=16",
    "learner.stop_at_target=false",
    "learner.stall_timeout_s=600",
)
INTERVALS: Final = 2880
"""Of 30 seconds, in a day."""
HOURS: Final = 24


def inject(address: str, folder: Path, host: int) -> "subprocess.Popen[bytes]":
    """Faults arrive on a simulated host all day, and every goal that the policy draws is tried."""
    words = f"--simulated {host} --seed {host} --client-key host-{host} --auto --explore 1 --interval 0"
    words += f" --daily-limit 100000 --steps {INTERVALS}"
    places = ("--server", address, "--folder", str(folder / f"host-{host}"))
    return subprocess.Popen(penstock("inject", *places, *words.split()), stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_goals_succeed_more_often_in_the_course_of_a_day(tmp_path: Path) -> None:
    address, words = f"unix:{tmp_path}/serve.sock", [word for one in DAY for word in ("--set", one)]
    words += ["--actors", "0", "--serve", address, "--total-steps", "100000000"]
    training = Training(tmp_path / "run", str(RECIPE), *words)
    try:
        training.until(lambda: (tmp_path / "serve.sock").exists())
        injectors = [inject(address, tmp_path, host) for host in range(4)]
        assert {injector.wait() for injector in injectors} == {0}
        training.process.terminate()
        training.end()
    finally:
        training.process.kill()
    files = tmp_path.glob("host-*/rl_feedback.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    success = [row["success"] for row in sorted(rows, key=lambda row: (row["timestamp"], row["success"]))]
    edges = [len(success) * hour // HOURS for hour in range(HOURS + 1)]
    hours = [fmean(success[edges[hour] : edges[hour + 1]]) for hour in range(HOURS)]
    print([round(one, 2) for one in hours], len(success))
    summary = training.summary()
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert summary["updates"] > 0
    assert fmean(hours[-6:]) > fmean(hours[:6]) + 0.2


LINES: Final = 20_000
ACTIONS: Final = 5
WIDTH: Final = 6
LOGGED: Final = np.array([0.10, 0.65, 0.25 / 3, 0.25 / 3, 0.25 / 3])
"""Probability with which the log's policy did the right action, the decoy, and each other one."""
SUCCESS: Final = np.array([0.8, 0.2, 0.5, 0.5, 0.5])
LOGGING_VALUE: Final = float(LOGGED @ SUCCESS)
LOG_STEPS: Final = 200_000
LOG_WITHIN_S: Final = 900.0


REWARDS: Final = [f"--reward={one}" for one in ("success=1", "failure=0", "step=0", "fast=0", "crash=0")]


def contexts(random_: np.random.Generator, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    seen = random_.normal(size=(count, WIDTH))
    ways = np.random.default_rng(7).normal(size=(WIDTH, ACTIONS))
    return seen, (seen @ ways).argmax(1)


def write_log(path: Path, seed: int, count: int, *, shuffled: bool = False) -> Path:
    draw = np.random.default_rng(seed)
    seen, right = contexts(draw, count)
    kind = draw.choice(ACTIONS, size=count, p=LOGGED)
    success = draw.random(count) < SUCCESS[kind]
    propensity = LOGGED[kind].tolist()
    if shuffled:
        random.Random(seed).shuffle(propensity)
    with path.open("w") as file:
        for number in range(count):
            line = {
                "time": float(number), "episode": str(number), "step": 0,
                "observation": {f"x{index}": float(one) for index, one in enumerate(seen[number])},
                "action": f"action{(right[number] + kind[number]) % ACTIONS}",
                "propensity": propensity[number], "result": {"success": bool(success[number])},
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    return path


def told_by(*words: str) -> str:
    done = subprocess.run(penstock(*words), capture_output=True, text=True, check=False, timeout=LOG_WITHIN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def learned_from_log(folder: Path, *, shuffled: bool) -> dict[str, float]:
    folder.mkdir()
    log = write_log(folder / "tasks.jsonl", 1, LINES, shuffled=shuffled)
    told_by("traces", "import", str(log), "--out", str(folder / "recording"), *REWARDS)
    recipe = folder / "recording" / "by_propensity.toml"
    Training(folder / "run", str(recipe), "--total-steps", str(LOG_STEPS)).completed(LOG_WITHIN_S)
    fresh = write_log(folder / "fresh.jsonl", 2, LINES)
    told = told_by("traces", "evaluate", str(fresh), "--policy", str(folder / "run"), "--json", *REWARDS)
    (found,) = json.loads(told)["policies"]
    assert found["judged"], found
    return dict(found["doubly_robust"])


@pytest.mark.slow
@pytest.mark.timeout(2 * LOG_WITHIN_S)
def test_a_policy_from_20000_lines_beats_the_one_that_logged_them(tmp_path: Path) -> None:
    good = learned_from_log(tmp_path / "true", shuffled=False)
    assert good["low"] > LOGGING_VALUE + 0.2, good
    bad = learned_from_log(tmp_path / "shuffled", shuffled=True)
    assert bad["high"] < LOGGING_VALUE, bad
