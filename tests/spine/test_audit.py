"""`penstock train` with journals: its books are whole while it runs, after kills, and once it has ended."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.run.child_process import penstock
from tests.support.run.training import PATIENCE_S, Training, wait_until_gone


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """CartPole with journals beside the run, named relative to the folder it is started from."""
    folder = tmp_path / "run"
    found = Training(
        folder,
        *("CartPole-v1", "--actors", "2", "--total-steps", "100000000"),
        *("--set", f"actor.ack_journal={os.path.relpath(tmp_path / 'acknowledged')}"),
        *("--set", "learner.stop_at_target=false", "--set", "learner.checkpoint_interval_s=1"),
    )
    yield found
    found.process.kill()
    found.process.communicate()
    wait_until_gone(found)


def audit(folder: Path, cwd: Path) -> dict[str, Any]:
    """What `penstock audit` finds, from another folder; AssertionError unless the books balance."""
    process = subprocess.run(
        penstock("audit", str(folder), "--json"),
        cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return dict(json.loads(process.stdout))


def test_a_run_accounts_for_every_fragment_that_its_actors_saw_acknowledged(
    training: Training, tmp_path: Path
) -> None:
    """While it goes on, with a killed actor and a killed learner behind it, and from its files at the end."""
    training.until_steps(5_000)
    live = audit(training.run_dir, tmp_path)
    assert "own Redis" in live["sources"]["log"]
    assert sum(live["journalled"].values()) > 0
    for name in ("actor-0", "learner"):
        os.kill(training.pids()[name], signal.SIGKILL)
    training.until_steps(training.steps() + 10_000)
    training.process.send_signal(signal.SIGINT)
    code, _, err = training.end()
    assert code == 130, err
    ended = audit(training.run_dir, tmp_path)
    assert "the run has ended" in ended["sources"]["log"]
    summary = training.summary()["ledger"]
    assert ended["fragments"]["trained"] == summary["trained"]
    assert ended["counters"]["acked"] == summary["acked"] == sum(ended["fragments"].values())
    # All but what a killed actor saw acknowledged in its last moment.
    assert sum(ended["journalled"].values()) >= summary["acked"] - 8
    lines = [json.loads(line) for line in (training.run_dir / "lineage.jsonl").read_text().splitlines()]
    assert all(line["digests"].keys() == line["sessions"].keys() for line in lines)
