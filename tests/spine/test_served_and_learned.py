"""A run without rollout workers learns from what clients do with the answers of its policy server."""

import subprocess
import sys
from pathlib import Path

from penstock.launch.run.supervisor import penstock
from tests.support.run.training import PATIENCE_S, Training


def test_what_clients_play_is_learned_and_accounted_for(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/serve.sock"
    training = Training(
        tmp_path / "run", "CartPole-v1", "--seed", "1", "--actors", "0", "--serve", address,
        "--total-steps", "2500", "--set", "learner.stop_at_target=false", "--set", "evaluation.episodes=2",
        "--set", f"actor.ack_journal={tmp_path / 'journals'}",
    )  # fmt: skip
    players = subprocess.Popen(
        [sys.executable, "-m", "tests.learning.cartpole_clients", address, "6", "0"],
        stderr=subprocess.DEVNULL,
    )
    try:
        code, _, err = training.end(4 * PATIENCE_S)
    finally:
        players.kill()
        players.wait()
        training.process.kill()
    assert code == 0, err
    summary = training.summary()
    assert summary["env_steps"] >= 2500
    assert summary["updates"] > 1
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert not any(one["role"] == "actor" for one in summary["processes"])
    audit = subprocess.run(
        penstock("audit", str(tmp_path / "run")),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
