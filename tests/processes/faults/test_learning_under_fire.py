"""Learning while processes die: a random one is killed every 20 s, and the return stays what it is without.

Whole runs of `penstock train` at equal steps, undisturbed and under fire, the same seeds for both. Any
process but the launcher may be hit: Redis, broker, learner, a rollout worker or the evaluator. The return is
that of the last version on the evaluation's fixed episodes. Each run under fire ends with an audit.
"""

import importlib.util
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import Training, is_alive

KILL_EVERY_S: Final = 20.0
LARGEST_LOSS: Final = 0.1
RESAMPLES: Final = 10_000
SEEDS: Final = (1, 2, 3, 4, 5)
needs_box2d = pytest.mark.skipif(
    importlib.util.find_spec("Box2D") is None,
    reason="LunarLander needs the box2d extra: make test-slow installs it",
)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("environment", "steps", "learned"),
    [
        pytest.param("CartPole-v1", 800_000, 400.0, id="cartpole"),
        pytest.param("LunarLander-v3", 500_000, 100.0, id="lunar-lander", marks=needs_box2d),
    ],
)
def test_a_kill_every_20_seconds_costs_at_most_a_tenth_of_the_return(
    environment: str, steps: int, learned: float, tmp_path: Path
) -> None:
    check_under_fire(environment, steps, learned, SEEDS, tmp_path)


def check_under_fire(
    environment: str, steps: int, learned: float, seeds: Sequence[int], folder: Path
) -> None:
    """The test. learned: mean return that the undisturbed runs must reach, or there is nothing to lose."""
    calm = np.array([train(environment, steps, seed, folder / f"calm-{seed}") for seed in seeds])
    hits: Counter[str] = Counter()
    fire = np.array([train(environment, steps, seed, folder / f"fire-{seed}", hits=hits) for seed in seeds])
    low, high = interval((fire - calm) / calm.mean(), random.Random(0))
    print(
        f"{environment}: calm {calm}, under fire {fire}, change {low:+.1%} to {high:+.1%}, kills {dict(hits)}"
    )
    assert hits.total() >= len(seeds), hits
    assert calm.mean() >= learned, calm
    assert high >= -LARGEST_LOSS, (calm, fire)


def train(environment: str, steps: int, seed: int, run_dir: Path, hits: Counter[str] | None = None) -> float:
    """The return of one run's last version. hits: kill, and count here what was killed."""
    training = Training(
        run_dir, environment, "--actors", "2", "--seed", str(seed), "--total-steps", str(steps),
        "--set", "learner.stop_at_target=false", "--set", "learner.checkpoint_interval_s=5",
        "--set", f"actor.ack_journal={run_dir / 'journals'}",
    )  # fmt: skip
    draw = random.Random(seed)
    try:
        while not training.ends_within(KILL_EVERY_S):
            # Neither before anything learns nor while the last version is evaluated: that would hit idle
            # processes.
            if hits is not None and 0 < training.steps() < steps:
                hits[kill_one(training, draw)] += 1
    finally:
        training.process.kill()
    assert training.process.returncode == 0, (run_dir / "logs" / "learner.log").read_text()[-2000:]
    summary = training.summary()
    assert summary["env_steps"] >= steps
    assert summary["ledger"]["balanced"], summary["ledger"]
    if hits is not None:
        audit = subprocess.run(penstock("audit", str(run_dir)), capture_output=True, text=True, check=False)
        assert audit.returncode == 0, audit.stdout + audit.stderr
    return float(summary["evaluation"]["mean"])


def kill_one(training: Training, draw: random.Random) -> str:
    """Kill -9 to any process of the run but the launcher; its role."""
    pids = {name: pid for name, pid in training.pids().items() if name != "launcher" and is_alive(pid)}
    name = draw.choice(sorted(pids))
    os.kill(pids[name], signal.SIGKILL)
    return name.partition("-")[0]


def interval(
    changes: "np.ndarray[tuple[int], np.dtype[np.float64]]", draw: random.Random
) -> tuple[float, float]:
    values = changes.tolist()
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]
