"""`penstock train` end to end: real processes, real Redis, several algorithms and environments."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.actor.acting.stepper import Stepper
from penstock.config.settings import EnvironmentSection
from penstock.launch.commands.request import Request
from penstock.launch.run.plan import make_plan, prepare_folder
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.model import make_model
from penstock.learner.publish.kept_versions import FinalPolicy, write_final
from penstock.policy import weights
from penstock.workloads.control.environment import make, spaces
from tests.support.run.harness import (
    GONE_S,
    LONG,
    OFTEN,
    Training,
    children,
    command,
    is_alive,
    wait_until_gone,
)


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


@pytest.mark.skipif(find_spec("minatar") is None, reason="its games are the extra minatar")
def test_breakout_is_learned_far_beyond_chance(tmp_path: Path) -> None:
    chance = random_returns(200)
    folder = tmp_path / "run"
    arguments = [part for setting in SETTINGS for part in ("--set", setting)]
    done = command(
        "train", GAME, "--run-dir", str(folder), "--actors", "1", "--seed", "1", "--total-steps", "100000",
        *arguments,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"]["balanced"]
    learned = summary["evaluation"]["mean"] - 3 * summary["evaluation"]["std"] / 50**0.5
    assert learned > 3 * (chance.mean() + 3 * chance.std() / 200**0.5), (summary["evaluation"], chance.mean())


needs_envpool = pytest.mark.skipif(find_spec("envpool") is None, reason="EnvPool is an extra")

BY_ENVPOOL = ("CartPole-v1", "--set", "environment.vectorise=envpool")


@needs_envpool
@pytest.mark.slow
def test_two_runs_in_lock_step_are_equal_bit_by_bit(tmp_path: Path) -> None:
    told = []
    for threads in (1, 3):
        folder = tmp_path / f"by-{threads}"
        done = command(
            "train", *BY_ENVPOOL, "--run-dir", str(folder), "--actors", "2", "--seed", "5",
            "--total-steps", "6144", "--set", f"environment.kwargs.num_threads={threads}",
            "--set", "algorithm.staleness=0", "--set", "run=the-same", "--set", "evaluation.episodes=7",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        evaluated = next(line for line in done.stdout.splitlines() if line.startswith("  evaluation "))
        told.append(((folder / "policies" / "final.safetensors").read_bytes(), evaluated))
    assert told[0] == told[1]


@needs_envpool
@pytest.mark.slow
def test_a_run_survives_kills_and_is_resumed(start: Callable[..., Training]) -> None:
    training = start(*BY_ENVPOOL, *LONG, *OFTEN)
    for name in ("actor-0", "evaluator"):
        training.until_steps(training.steps() + 2_000)
        os.kill(training.pids()[name], signal.SIGKILL)
    training.until_steps(training.steps() + 4_000)
    for pid in [*training.pids().values(), training.process.pid]:
        with contextlib.suppress(ProcessLookupError):  # some end with those that were killed before
            os.kill(pid, signal.SIGKILL)
    training.process.communicate()
    wait_until_gone(training)
    again = start("--resume")
    again.until_steps(4_000)
    again.process.send_signal(signal.SIGINT)
    code, _, err = again.end()
    assert code == 130, err
    assert again.summary()["ledger"]["balanced"]


# Pushes where pole and cart lean and move to: balances for all of the 500 steps.
LEAN = (0.5, 1.0, 10.0, 3.0)


def balancing_run(run_dir: Path) -> None:
    """The folder of an ended run whose policy was not learned but set.

    A linear controller through two layers.
    """
    plan = make_plan(
        Request(what="CartPole-v1", run_dir=run_dir, assignments=("policy.hidden_sizes=[4, 4]",))
    )
    prepare_folder(plan)
    model = make_model(plan.settings)
    (policy,) = model.algorithm.published_modules().values()
    state = policy.state_dict()
    with torch.no_grad():
        for name in [name for name in state if name.startswith("actor")]:
            state[name].zero_()
        # Small numbers: tanh of them is nearly the numbers themselves.
        state["actor_body.layers.0.weight"][0] = torch.tensor(LEAN) / 100
        state["actor_body.layers.2.weight"][0, 0] = 1.0
        state["actor_head.weight"][1, 0] = 1000.0
    final = FinalPolicy(specification=model.specification, blob=weights.encode(policy), version=9, update=8)
    write_final(run_dir, final)


def penstock_json(*arguments: str) -> dict[str, Any]:
    done = command(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def entropy(recording: Path) -> float:
    content = Recording(recording)
    arrays: list[Any] = [one for _, one in content.load(content.fragments)]
    return -float(np.concatenate([one["log_prob"][one["valid"]] for one in arrays]).mean())


def test_the_clone_of_a_solved_policy_solves_the_task(tmp_path: Path) -> None:
    teacher, recording, run = tmp_path / "teacher", tmp_path / "recording", tmp_path / "run"
    balancing_run(teacher)
    made = penstock_json("record", str(teacher), "--out", str(recording), "--steps", "8192")
    assert made["version"] == 9
    assert made["mean_return"] == 500.0
    assert 8192 <= made["steps"] < 8192 + 64 * 16
    assert Recording(recording).batches == ()
    summary = penstock_json(
        "train", "CartPole-v1", "--from", str(recording), "--run-dir", str(run), "--seed", "1",
        "--set", "algorithm.name=clone", "--set", "learner.total_steps=80000",
        "--set", "evaluation.both=true", "--set", "evaluation.episodes=20",
    )  # fmt: skip
    assert (summary["solved"], summary["ending"]) in ((True, "recording"), (True, "steps"))
    assert summary["evaluation"]["mean"] >= 475
    assert summary["evaluation"]["deterministic"]["episodes"] == 20
    assert summary["evaluation"]["sampled"]["mean"] >= 475
    assert summary["ledger"] == {"acked": 0, "trained": 0, "dropped": {}, "resident": 0, "balanced": True}
    assert summary["recording"]["fragments"] == made["fragments"]
    roles = {one["role"] for one in summary["processes"]}
    assert roles == {"launcher", "redis", "broker", "learner", "evaluator"}
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    # The teacher draws its actions: nothing predicts them better than the teacher's own probabilities.
    assert 0.95 * entropy(recording) < last["validation_nll"] < 1.15 * entropy(recording)
    assert last["validation_accuracy"] > 0.8
    assert last["evaluation_sampled"] == summary["evaluation"]["sampled"]["mean"]


def test_without_a_recording_there_is_nothing_to_clone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--from .*nowhere: holds no recording\.json"):
        make_plan(Request(what="CartPole-v1", run_dir=tmp_path, recording=tmp_path / "nowhere"))
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path, assignments=("algorithm.name=clone",)))
    with pytest.raises(
        ValueError, match=r"algorithm.name='clone': imitates a recording; name it with --from"
    ):
        make_model(plan.settings)
