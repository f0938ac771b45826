"""A run that is interrupted drains, and goes on where it ended when it is resumed."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.training import LONG, Training, is_alive, trainings


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings in one run folder; nothing of them is left afterwards."""
    with trainings(tmp_path / "run") as started:
        yield started


@pytest.mark.promise("ctrl-c-drains-run")
def test_ctrl_c_drains_within_15_seconds_and_resume_goes_on(start: Callable[..., Training]) -> None:
    first = start("CartPole-v1", *LONG)
    first.until_steps(2_000)
    status = subprocess.run(
        penstock("status", str(first.run_dir), "--json"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(status.stdout)["desired"] == "RUN_STATE_RUNNING"
    first.process.send_signal(signal.SIGINT)
    code, out, err = first.end()
    assert code == 130
    # After 15 seconds the launcher kills what is left, and says so.
    assert "did not drain in time" not in out + err
    assert "interrupted" in out
    assert not any(is_alive(pid) for pid in first.pids().values())
    stopped = first.summary()
    assert stopped["interrupted"]
    assert stopped["ledger"]["balanced"]
    before = _lineage(first)

    second = start("--resume")
    assert second.steps() == stopped["env_steps"]
    second.until_steps(2_000)
    second.process.send_signal(signal.SIGTERM)
    code, _, err = second.end()
    assert code == 130, err
    resumed = second.summary()
    assert resumed["run"] == stopped["run"]
    assert resumed["env_steps"] >= stopped["env_steps"] + 2_000
    assert resumed["ledger"]["balanced"]
    # A slow actor's fragment may be stale in either run; none is because of the restart.
    of_first = {session for line in before for session in line["sessions"]}
    assert of_first
    for line in _lineage(second)[len(before) :]:
        assert of_first.isdisjoint(line["left_out"].get("stale", ()))


def _lineage(training: Training) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (training.run_dir / "lineage.jsonl").read_text().splitlines()]
