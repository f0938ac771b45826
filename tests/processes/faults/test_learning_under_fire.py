"""Learning while processes die, and while an actor sends poison: the task is solved all the same."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock.protocol.spaces import Box, Discrete, Space
from tests.support.abuse.poisoner import Way, read_poisons, ways_against
from tests.support.oracles.poison_books import PoisonBooks
from tests.support.run.harness import OFTEN, Training, command, is_alive, trainings

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
        audit = command("audit", str(run_dir))
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


CHOICE: Final = Discrete(2)
FORCE: Final = Box(np.full(1, -2, np.float32), np.full(1, 2, np.float32))
TIMES: Final = 4
SLOW_S: Final = 900.0
BEGUN_STEPS: Final = 50_000
PASSES: Final = 10
EXPLORES_BRIEFLY: Final = ("algorithm.epsilon_fraction=0.0002",)
"""20,000 of the steps of a run that ends when it is asked to."""


@dataclass(frozen=True)
class Task:
    """A task that a run must solve. max_reward: as a person sets it who knows the task."""

    environment: str
    algorithm: str
    target: float
    action: Space
    max_reward: float
    weighs: bool = False
    settings: tuple[str, ...] = ()

    @property
    def ways(self) -> list[Way]:
        return ways_against(self.action, weighs=self.weighs)

    def arguments(self) -> list[str]:
        said = (f"algorithm.name={self.algorithm}", f"broker.max_reward={self.max_reward}", *self.settings)
        return [
            *(self.environment, "--seed", "1", "--actors", "2", "--target-return", str(self.target), *OFTEN),
            *("--total-steps", "100000000", "--set", "learner.stop_at_target=false"),
            *(part for text in said for part in ("--set", text)),
        ]


PPO = Task("CartPole-v1", "ppo", 475, CHOICE, 10.0, weighs=True)
TASKS = (
    PPO,
    Task("CartPole-v1", "impala", 475, CHOICE, 10.0, weighs=True),
    Task("CartPole-v1", "reinforce", 475, CHOICE, 10.0, weighs=True),
    Task("CartPole-v1", "dqn", 195, CHOICE, 10.0, settings=EXPLORES_BRIEFLY),
    Task("Pendulum-v1", "sac", -250, FORCE, 20.0),
)


@contextmanager
def poisoner(training: Training, poisons: Path, task: Task, *, every: int) -> Iterator[None]:
    """An actor of the run that spoils one of so many fragments; it ends with the block."""
    training.until(lambda: bool(_broker(training)))
    weighs = ("--weighs",) if task.weighs else ()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.abuse.poisoner", "--broker", _broker(training)),
            *("--actor-id", "poisoner", "--poisons", str(poisons), "--every", str(every), *weighs),
        ],
        stderr=(poisons.parent / "poisoner.log").open("ab"),
    )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0, (poisons.parent / "poisoner.log").read_text()[-2000:]


def _broker(training: Training) -> str:
    path = training.run_dir / "endpoints.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    alive = [one["address"] for name, one in found.items() if name.startswith("broker")]
    return str(alive[0]) if alive and training.steps() > training.began_steps else ""


def unnamed(run_dir: Path, poisons: Path, ways: Sequence[Way]) -> set[str]:
    return PoisonBooks(run_dir).unnamed(read_poisons(poisons), ways)


def is_tried(run_dir: Path, poisons: Path, ways: Sequence[Way]) -> bool:
    """Whether all are found out, or each came several times: the newest lie in no checkpoint yet."""
    return not unnamed(run_dir, poisons, ways) or len(read_poisons(poisons)) > TIMES * len(ways)


def check_books(run_dir: Path, poisons: Path) -> None:
    """See `PoisonBooks.check`; the summary's books balance."""
    PoisonBooks(run_dir).check(read_poisons(poisons))
    assert json.loads((run_dir / "summary.json").read_text())["ledger"]["balanced"]


def stop(training: Training) -> None:
    training.process.send_signal(signal.SIGINT)
    code, _, err = training.end()
    assert code == 130, err


@pytest.mark.promise("run-poisoned-ways-books")
def test_every_detectable_poison_is_named_and_no_honest_fragment(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    poisons = tmp_path / "poisons.jsonl"
    training = start(*PPO.arguments())
    with poisoner(training, poisons, PPO, every=2):
        training.until(lambda: is_tried(training.run_dir, poisons, PPO.ways))
    stop(training)
    check_books(training.run_dir, poisons)
    assert not unnamed(training.run_dir, poisons, PPO.ways)


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_S)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.algorithm)
def test_a_poisoned_run_is_resumed_and_solved(
    task: Task, start: Callable[..., Training], tmp_path: Path
) -> None:
    poisons = tmp_path / "poisons.jsonl"
    training = start(*task.arguments())
    with poisoner(training, poisons, task, every=5):
        training.until(lambda: is_tried(training.run_dir, poisons, task.ways))
    stop(training)
    training = start("--resume", "--set", "learner.stop_at_target=true")
    with poisoner(training, poisons, task, every=5):
        code, _, err = training.end(SLOW_S)
    assert code == 0, err
    assert training.summary()["solved"]
    check_books(training.run_dir, poisons)
    assert not unnamed(training.run_dir, poisons, task.ways)


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_S)
def test_a_clone_of_a_poisoned_runs_recording_solves(start: Callable[..., Training], tmp_path: Path) -> None:
    poisons, recording = tmp_path / "poisons.jsonl", tmp_path / "recording"
    training = start(*PPO.arguments(), "--set", f"learner.record={recording}")
    with poisoner(training, poisons, PPO, every=5):
        training.until(lambda: is_tried(training.run_dir, poisons, PPO.ways))
    stop(training)
    check_books(training.run_dir, poisons)
    assert not unnamed(training.run_dir, poisons, PPO.ways)
    with trainings(tmp_path / "clone") as start_clone:
        clone = start_clone(
            *("CartPole-v1", "--from", str(recording), "--set", "algorithm.name=clone", *OFTEN),
            *("--target-return", str(PPO.target), "--total-steps", str(PASSES * training.steps())),
            *("--set", "learner.stop_at_target=false"),
        )
        clone.until_steps(BEGUN_STEPS)
        stop(clone)
        clone = start_clone("--resume", "--set", "learner.stop_at_target=true")
        code, _, err = clone.end(SLOW_S)
        assert code == 0, err
        assert clone.summary()["solved"]
