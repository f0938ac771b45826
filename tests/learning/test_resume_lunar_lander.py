"""A LunarLander run that is stopped half-way goes on where it was: SIGTERM, and `kill -9` of everything."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.run.harness import Training, wait_until_gone

pytest.importorskip("Box2D", reason="LunarLander needs the box2d extra: make learn installs it")

HALF = 120_000
LEARNING_S = 900.0
"""Patience for the second half, on a machine that has other work."""
NOISE = 60.0
"""Returns of LunarLander swing by this much between two windows of 100 episodes while it learns."""
RUN = (
    "LunarLander-v3", "--seed", "1", "--total-steps", "240000",
    "--set", "learner.stop_at_target=false", "--set", "learner.checkpoint_interval_s=2",
)  # fmt: skip


def curve(run_dir: Path) -> list[tuple[int, float]]:
    """Environment steps and mean return, in the order they were written."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["env_steps"], row["mean_return"]) for row in rows if row["mean_return"] is not None]


def stop(training: Training) -> None:
    """SIGTERM to the launcher: drain, checkpoint, summary."""
    training.process.send_signal(signal.SIGTERM)
    assert training.end()[0] == 130


def kill(training: Training) -> None:
    """`kill -9` to every process at once: no process writes a word more."""
    for pid in (training.process.pid, *training.pids().values()):
        os.kill(pid, signal.SIGKILL)
    training.end()
    wait_until_gone(training)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("end", [stop, kill], ids=["sigterm", "kill-9"])
def test_the_curve_continues_and_nothing_is_stale(end: object, tmp_path: Path) -> None:
    assert callable(end)
    first = Training(tmp_path / "run", *RUN)
    first.until_steps(HALF)
    end(first)
    before = curve(tmp_path / "run")

    second = Training(tmp_path / "run", "--resume")
    code, _, err = second.end(within_s=LEARNING_S)
    assert code == 0, err
    summary = second.summary()
    after = curve(tmp_path / "run")[len(before) :]
    committed = after[0][0]
    assert 0 < committed <= before[-1][0] + 4 * 4096
    level = [value for steps, value in before if steps <= committed][-1]
    assert all(value >= level - NOISE for steps, value in after)
    assert after[-1][1] > level
    assert summary["env_steps"] >= 240_000
    assert summary["ledger"]["balanced"]
    assert not summary["ledger"]["dropped"].get("stale")
