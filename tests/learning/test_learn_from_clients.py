"""A run that has no rollout worker.

It learns CartPole from what clients do with its answers, while they are killed.
"""

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import Training

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
    audit = subprocess.run(
        penstock("audit", str(tmp_path / "run")), capture_output=True, text=True, check=False
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr


def start_client(address: str, number: int) -> "subprocess.Popen[bytes]":
    """A process of players."""
    command = [
        sys.executable, "-m", "tests.learning.cartpole_clients", address, str(PLAYERS), str(number * PLAYERS),
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)
