"""`penstock control flush` reaches what a real policy server holds of an episode that goes on."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import PolicyClient
from penstock.launch.run.supervisor import penstock
from tests.support.run.training import PATIENCE_S, Training, wait_until_gone

STEPS = 12


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A run that learns only from clients, in batches larger than what any of them sends here."""
    address = f"unix:{tmp_path}/serve.sock"
    started = Training(
        tmp_path / "run", "CartPole-v1", "--actors", "0", "--serve", address, "--total-steps", "100000000",
        "--set", "learner.stop_at_target=false", "--set", "learner.stall_timeout_s=600",
    )  # fmt: skip
    yield started
    started.process.kill()
    started.process.communicate()
    wait_until_gone(started)


def flushed(training: Training) -> dict[str, Any]:
    """The answer of `penstock control flush`."""
    command = penstock("control", "flush", str(training.run_dir), "--min-steps", "1", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def serves(training: Training) -> bool:
    endpoints = training.run_dir / "endpoints.json"
    found = json.loads(endpoints.read_text()) if endpoints.exists() else {}
    return any(one["role"] == "server" for one in found.values())


def test_a_flush_takes_the_steps_of_an_episode_that_goes_on(training: Training, tmp_path: Path) -> None:
    training.until(lambda: serves(training))
    with PolicyClient(f"unix:{tmp_path}/serve.sock", deadline_s=60) as client:
        observation = np.zeros(4, np.float32)
        # What the fallback answers before the first weights arrive is no experience.
        early = client.start_episode("bob", learned=False)
        training.until(lambda: not early.act(observation).fallback)
        episode = client.start_episode("ada")
        for step in range(STEPS):
            episode.act(observation, reward=1.0 if step else None)
        first = flushed(training)
        for _ in range(STEPS):
            episode.act(observation, reward=1.0)
        second = flushed(training)
    assert (first["state"], int(first["steps"])) == ("COMMAND_STATE_DONE", STEPS - 1), first
    assert (second["state"], int(second["steps"])) == ("COMMAND_STATE_DONE", STEPS), second
    training.process.terminate()
    training.end()
    summary = training.summary()
    assert summary["ledger"]["balanced"]
    assert (summary["updates"], summary["env_steps"]) == (2, 2 * STEPS - 1)
