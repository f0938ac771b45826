"""Tasks of control are learned: what a policy sees and remembers, late rewards, kills, clients.

Thresholds of the small forms lie far above what a policy reaches that does not look, whose return is known.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.config.settings import load
from penstock.learner.algorithms.registry import ALGORITHMS
from penstock.learner.batch import assemble
from penstock.policy.weights import encode, load_into
from penstock.protocol.tensor import Array
from tests.learning.small_form import EPISODES, learned, settings_of
from tests.support.experience.experience import Collector, small_policy
from tests.support.run import harness
from tests.support.run.harness import Training, wait_until_gone
from tests.support.serving import node_client

TASKS = "penstock.workloads.control.tasks"
SMALL_CATCH = {"kwargs": {"rows": 6, "columns": 5}}
BLIND_CATCH = 2 / 5 - 1


class Aim(gymnasium.Env[Any, Any]):
    """One step: press the button that is shown and point where it is shown.

    1 − |error| for the right button, else 0.

    A policy that does not look presses the right one of three in a third of the cases, and points 1/2 off at
    best.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    observation_space = spaces.Dict(button=spaces.Discrete(3), at=spaces.Box(-1, 1, (1,), np.float32))
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float32)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._button = int(self.np_random.integers(3))
        self._at = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        button, place = action
        reward = 1.0 - abs(float(place[0] - self._at[0])) if button == self._button else 0.0
        return self._look(), reward, True, False, {}

    def _look(self) -> dict[str, Any]:
        return {"button": np.int64(self._button), "at": self._at}


BLIND_AIM = 1 / 3 * 1 / 2


def test_an_image_is_learned_from() -> None:
    settings = settings_of(f"{TASKS}:Catch-v0", 1, 12_288, environment=SMALL_CATCH)
    assert learned(settings) >= 0.8 > BLIND_CATCH + 1.0


def test_every_part_of_a_dict_is_learned_from() -> None:
    assert learned(settings_of(f"{TASKS}:Courier-v0", 1, 16_384)) >= 0.45


@pytest.mark.parametrize("section", [{}, {"hidden_norm": "layer", "dropout": 0.1}, {"hidden_norm": "batch"}])
def test_both_parts_of_a_hybrid_action_are_learned(
    section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    aim = gymnasium.envs.registration.EnvSpec("Aim-v0", entry_point=lambda **_: Aim())
    monkeypatch.setitem(gymnasium.registry, "Aim-v0", aim)
    algorithm = {"batch_steps": 256, "epochs": 4, "minibatches": 4, "learning_rate": 5e-3, "discount": 0.0}
    told = {"policy": section, "algorithm": algorithm, "actor": {"unroll_length": 16}}
    assert learned(settings_of("Aim-v0", 1, 6_144, **told)) >= 0.8 > BLIND_AIM + 0.6


RECALL, MENU = f"{TASKS}:Recall-v0", f"{TASKS}:Menu-v0"
SHORT_RECALL: dict[str, Any] = {
    "environment": {"kwargs": {"cues": 2, "delay": 4}},
    "actor": {"unroll_length": 16},
    "algorithm": {"batch_steps": 1024},
}


@pytest.mark.parametrize(
    "policy", [{"recurrent": "gru"}, {"recurrent": "lstm"}, {"recurrent": "none", "frame_stack": 6}], ids=str
)
def test_a_policy_that_remembers_recalls_the_cue(policy: dict[str, Any]) -> None:
    assert learned(settings_of(RECALL, 1, 20_000, policy=policy, **SHORT_RECALL)) >= 0.95


def test_a_policy_that_cannot_remember_stays_at_chance() -> None:
    sections = {"policy": {"recurrent": "none"}, "algorithm": {"batch_steps": 1024}}
    found = learned(settings_of(RECALL, 1, 6_000, **sections))
    assert abs(found - 0.25) <= 4 * (0.25 * 0.75 / EPISODES) ** 0.5


def test_masks_make_the_best_of_every_menu() -> None:
    assert learned(settings_of(MENU, 2, 8_000)) >= 7.78
    assert learned(settings_of(MENU, 2, 4_000, environment={"mask_key": ""})) <= 2.0


LENGTH, LIMIT, LAG, UPDATES = 5, 30, 2, 60
OPTIMUM: Final = 1 / LENGTH


class Corridor:
    """Reward 1 at the end of a corridor of LENGTH steps, where the episode terminates; 0 on the way and back.

    A policy that tosses a coin gets about 0.035 per step.
    """

    def __init__(self) -> None:
        self._place = self._step = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self._place = self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._step += 1
        self._place = max(0, self._place + (1 if action else -1))
        done = self._place == LENGTH
        return self._observe(), float(done), done, self._step == LIMIT and not done, {}

    def _observe(self) -> Array:
        return np.array([self._place / LENGTH, 1.0, self._place % 2, 0.0], np.float32)


NUMBERS: dict[str, dict[str, Any]] = {
    "ppo": {"learning_rate": 3e-3},
    "impala": {"learning_rate": 1e-2, "entropy_coefficient": 0.003},
    "reinforce": {"learning_rate": 1e-2, "entropy_coefficient": 0.003},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_late_reward_is_learned_from_lagging_experience(name: str, seed: int) -> None:
    section = load([{"algorithm": {"name": name, "discount": 0.95, **NUMBERS[name]}}]).algorithm
    algorithm = ALGORITHMS[name](small_policy(seed), section, seed=seed)
    behaviour = small_policy(seed)
    behaviour.seed_actions(seed)
    collector = Collector([Corridor() for _ in range(8)])
    waiting = deque([encode(algorithm.published_modules()["default"])], maxlen=LAG + 1)
    rates = []
    for _ in range(UPDATES):
        load_into(behaviour, waiting[0])
        batch = assemble([collector.fragment(behaviour, 32)], torch.device("cpu"))
        rates.append(float(batch.reward.mean()))
        assert algorithm.update(batch, progress=0.0).applied
        waiting.append(encode(algorithm.published_modules()["default"]))
    assert np.mean(rates[:5]) < 0.4 * OPTIMUM, "too easy to tell anything"
    assert np.mean(rates[-5:]) > 0.85 * OPTIMUM, [round(rate, 3) for rate in rates]


HALF = 120_000
LEARNING_S = 900.0
"""Patience for the second half, on a machine that has other work."""
NOISE = 60.0
"""Returns of LunarLander swing by this much between two windows of 100 episodes while it learns."""
LANDER = (
    "LunarLander-v3", "--seed", "1", "--total-steps", "240000",
    "--set", "learner.stop_at_target=false", "--set", "learner.checkpoint_interval_s=2",
)  # fmt: skip


def curve(run_dir: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["env_steps"], row["mean_return"]) for row in rows if row["mean_return"] is not None]


def stop(training: Training) -> None:
    training.process.send_signal(signal.SIGTERM)
    assert training.end()[0] == 130


def kill(training: Training) -> None:
    for pid in (training.process.pid, *training.pids().values()):
        os.kill(pid, signal.SIGKILL)
    training.end()
    wait_until_gone(training)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("end", [stop, kill], ids=["sigterm", "kill-9"])
def test_the_curve_continues_and_nothing_is_stale(end: Callable[[Training], None], tmp_path: Path) -> None:
    pytest.importorskip("Box2D", reason="LunarLander needs the box2d extra: make learn installs it")
    first = Training(tmp_path / "run", *LANDER)
    first.until_steps(HALF)
    end(first)
    before = curve(tmp_path / "run")

    second = Training(tmp_path / "run", "--resume")
    summary = second.completed(LEARNING_S)
    after = curve(tmp_path / "run")[len(before) :]
    committed = after[0][0]
    assert 0 < committed <= before[-1][0] + 4 * 4096
    level = [value for steps, value in before if steps <= committed][-1]
    assert all(value >= level - NOISE for steps, value in after)
    assert after[-1][1] > level
    assert summary["env_steps"] >= 240_000
    assert not summary["ledger"]["dropped"].get("stale")


CLIENTS: Final = 3
PLAYERS: Final = 6
"""Of each client."""
KILL_EVERY_STEPS: Final = 4_000
LOOK_EVERY_S: Final = 1.0


@pytest.mark.promise("run-without-rollout-workers")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cartpole_is_learned_from_clients_that_are_killed_and_restarted(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/serve.sock"
    training = Training(
        tmp_path / "run", "CartPole-v1", "--seed", "1", "--actors", "0", "--serve", address,
        "--target-return", "450", "--total-steps", "400000",
        "--set", f"actor.ack_journal={tmp_path / 'journals'}",
    )  # fmt: skip
    draw, kills, due = random.Random(1), 0, KILL_EVERY_STEPS
    clients = [start_client(address, index) for index in range(CLIENTS)]
    try:
        while not training.ends_within(LOOK_EVERY_S):
            if training.steps() >= due:
                due = training.steps() + KILL_EVERY_STEPS
                index = draw.randrange(CLIENTS)
                clients[index].send_signal(signal.SIGKILL)
                clients[index].wait()
                kills += 1
                clients[index] = start_client(address, CLIENTS * kills + index)
    finally:
        for client in clients:
            client.kill()
            client.wait()
        training.process.kill()
    assert training.process.returncode == 0, (tmp_path / "run" / "logs" / "server.log").read_text()[-2000:]
    summary = training.summary()
    print(f"{kills} kills, {summary['env_steps']} steps, {summary['evaluation']}")
    assert summary["solved"]
    assert summary["evaluation"]["mean"] >= 450
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert kills >= 3
    assert not any(one["role"] == "actor" for one in summary["processes"])
    training.audited()


def start_client(address: str, number: int) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable, "-m", "tests.learning.cartpole_clients", address, str(PLAYERS), str(number * PLAYERS),
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


EXAMPLE: Final = Path(__file__).resolve().parents[2] / "examples" / "python" / "cartpole_client.py"
SERVED_EPISODES: Final = 20
PATIENCE_S: Final = 300.0


@pytest.mark.promise("clients-python-node-js")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clients_in_python_and_node_solve_cartpole_with_a_trained_policy(tmp_path: Path) -> None:
    node_client.install()
    training = Training(tmp_path / "run", "CartPole-v1", "--seed", "1")
    assert training.completed(PATIENCE_S)["solved"]
    with harness.server(tmp_path, training.run_dir) as server:
        played = subprocess.run(
            [sys.executable, str(EXAMPLE), server.address, str(SERVED_EPISODES)],
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        returns = [float(line) for line in played.stdout.splitlines()]
        assert (len(returns), statistics.fmean(returns) >= 475) == (SERVED_EPISODES, True), returns
        result = node_client.play(server.address, SERVED_EPISODES)
        assert (result["episodes"], result["mean_return"] >= 475) == (SERVED_EPISODES, True), result
