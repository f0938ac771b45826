"""Each part of a run is killed once: the launcher starts it again, and the books are whole all along."""

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.training import LONG, OFTEN, PATIENCE_S, Training, trainings

PARTS = ("actor-0", "broker", "learner", "redis")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder; nothing of them is left afterwards."""
    with trainings(tmp_path / "run") as started:
        yield started


def audit(folder: Path, cwd: Path) -> dict[str, Any]:
    """What `penstock audit` finds, from another folder; AssertionError unless the books balance."""
    process = subprocess.run(
        penstock("audit", str(folder), "--json"),
        cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return dict(json.loads(process.stdout))


def test_a_run_goes_on_after_the_death_of_each_of_its_parts(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    journals = os.path.relpath(tmp_path / "acknowledged")
    training = start("CartPole-v1", *LONG, *OFTEN, "--set", f"actor.ack_journal={journals}")
    for name in PARTS:
        training.until_steps(training.steps() + 2_000)
        os.kill(training.pids()[name], signal.SIGKILL)
    training.until_steps(training.steps() + 2_000)
    live = audit(training.run_dir, tmp_path)
    assert "own Redis" in live["sources"]["log"]
    assert sum(live["journalled"].values()) > 0
    training.process.send_signal(signal.SIGINT)
    code, out, err = training.end()
    assert code == 130, err
    summary = training.summary()
    assert summary["ledger"]["balanced"]
    assert restarts(summary) == {"actor": 1, "broker": 1, "learner": 1, "redis": 1}
    assert "learner died (signal 9), restarting" in out
    assert_accounted(training.run_dir, tmp_path, summary["ledger"])


def assert_accounted(run_dir: Path, cwd: Path, ledger: dict[str, Any]) -> None:
    """The files of a run that has ended agree with each other and with what its actors recorded."""
    ended = audit(run_dir, cwd)
    assert "the run has ended" in ended["sources"]["log"]
    assert ended["fragments"]["trained"] == ledger["trained"]
    assert ended["counters"]["acked"] == ledger["acked"] == sum(ended["fragments"].values())
    # All but what a killed actor saw acknowledged in its last moment.
    assert sum(ended["journalled"].values()) >= ledger["acked"] - 8
    lines = [json.loads(line) for line in (run_dir / "lineage.jsonl").read_text().splitlines()]
    assert all(line["digests"].keys() == line["sessions"].keys() for line in lines)


@pytest.mark.promise("counts-balance-actor-broker")
@pytest.mark.slow
def test_a_run_survives_the_death_of_each_of_its_parts(start: Callable[..., Training]) -> None:
    training = start(
        "CartPole-v1", "--total-steps", "400000", "--set", "learner.stop_at_target=false", *OFTEN
    )
    steps = 20_000
    for name in PARTS:
        training.until_steps(steps)
        steps = training.steps() + 30_000
        os.kill(training.pids()[name], signal.SIGKILL)
    code, out, err = training.end()
    assert code == 0, err
    summary = training.summary()
    assert summary["solved"]
    assert summary["ledger"]["balanced"]
    assert restarts(summary) == {"actor": 1, "broker": 1, "learner": 1, "redis": 1}
    assert "learner died (signal 9), restarting" in out


def restarts(summary: dict[str, Any]) -> dict[str, int]:
    """How often processes of each role that was killed were started again."""
    roles = Counter[str]()
    for one in summary["processes"]:
        roles[one["role"]] += one["restarts"]
    return {role: roles[role] for role in ("actor", "broker", "learner", "redis")}
