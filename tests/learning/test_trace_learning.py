"""A policy from 20,000 lines of a log beats the one that logged them, by true propensities and only by these.

The log's policy mostly does a decoy that seldom succeeds. An action's logged successes are many for the decoy
and few for the right one, which almost always succeeds: only propensities tell the two apart.
"""

import json
import random
import subprocess
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import Training

LINES: Final = 20_000
ACTIONS: Final = 5
WIDTH: Final = 6
LOGGED: Final = np.array([0.10, 0.65, 0.25 / 3, 0.25 / 3, 0.25 / 3])
"""Probability with which the log's policy did the right action, the decoy, and each other one."""
SUCCESS: Final = np.array([0.8, 0.2, 0.5, 0.5, 0.5])
LOGGING_VALUE: Final = float(LOGGED @ SUCCESS)
STEPS: Final = 200_000
WITHIN_S: Final = 900.0


def contexts(random_: np.random.Generator, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What is observed, [n, WIDTH], and which action is right there, [n]."""
    seen = random_.normal(size=(count, WIDTH))
    ways = np.random.default_rng(7).normal(size=(WIDTH, ACTIONS))
    return seen, (seen @ ways).argmax(1)


def write_log(path: Path, seed: int, count: int, *, shuffled: bool = False) -> Path:
    """Lines of single decisions. shuffled: each has the propensity of another one."""
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


def command(*words: str) -> str:
    """What a command prints."""
    done = subprocess.run(penstock(*words), capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def learned(folder: Path, *, shuffled: bool) -> dict[str, float]:
    """What a policy learned from 20,000 lines earns on 20,000 others, by the log's true propensities."""
    log = write_log(folder / "tasks.jsonl", 1, LINES, shuffled=shuffled)
    command("traces", "import", str(log), "--out", str(folder / "recording"), *rewards())
    training = Training(
        folder / "run", str(folder / "recording" / "by_propensity.toml"), "--total-steps", str(STEPS)
    )
    code, _, err = training.end(WITHIN_S)
    assert code == 0, err
    fresh = write_log(folder / "fresh.jsonl", 2, LINES)
    told = json.loads(
        command("traces", "evaluate", str(fresh), "--policy", str(folder / "run"), "--json", *rewards())
    )
    (found,) = told["policies"]
    assert found["judged"], found
    return dict(found["doubly_robust"])


def rewards() -> list[str]:
    """A success earns 1, and nothing else counts."""
    return [
        word
        for one in ("success=1", "failure=0", "step=0", "fast=0", "crash=0")
        for word in ("--reward", one)
    ]


@pytest.mark.slow
@pytest.mark.timeout(2 * WITHIN_S)
def test_a_policy_from_20000_lines_beats_the_one_that_logged_them(tmp_path: Path) -> None:
    (tmp_path / "true").mkdir()
    (tmp_path / "shuffled").mkdir()
    good = learned(tmp_path / "true", shuffled=False)
    assert good["low"] > LOGGING_VALUE + 0.2, good
    bad = learned(tmp_path / "shuffled", shuffled=True)
    assert bad["high"] < LOGGING_VALUE, bad
