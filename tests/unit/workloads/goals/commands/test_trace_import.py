"""`penstock traces import`: the recording holds what the log holds, step by step."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.learner.feed.recorded_feed import Recording
from penstock.workloads.goals.commands import trace_commands
from tests.support.experience.bandit_log import bandit_log
from tests.support.oracles import off_policy_truth as truth

COUNT = 500


def imported(path: Path, out: Path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """What the command says, and what the recording holds, row by row."""
    reply = CliRunner().invoke(trace_commands, ["import", str(path), "--out", str(out), "--json"])
    assert reply.exit_code == 0, reply.output
    recording = Recording(out)
    loaded = recording.load(recording.fragments)
    names = ("observation", "action", "reward", "terminated", "log_prob")
    rows = {
        name: np.concatenate([arrays[name][: header.steps, 0] for header, arrays in loaded]) for name in names
    }
    return json.loads(reply.output), rows


def test_a_recording_holds_every_decision(tmp_path: Path) -> None:
    account, rows = imported(bandit_log(tmp_path, 0, COUNT), tmp_path / "out")
    events = truth.bandit_log(0, COUNT)
    assert (account["episodes"], account["propensities"]) == (COUNT, "logged")
    assert rows["observation"][:, :3].argmax(1).tolist() == [event.context for event in events]
    assert rows["action"].tolist() == [event.action for event in events]
    assert rows["reward"] == pytest.approx([0.99 if event.reward else -0.51 for event in events])
    assert rows["terminated"].all()
    assert np.exp(rows["log_prob"]) == pytest.approx([event.logged for event in events], rel=1e-5)
    told = tomllib.loads((tmp_path / "out" / "run.toml").read_text())
    assert told["environment"]["kwargs"]["actions"] == ["action0", "action1", "action2"]


def test_propensities_that_are_absent_are_estimated_and_marked(tmp_path: Path) -> None:
    account, rows = imported(bandit_log(tmp_path, 0, 4000, propensity=None), tmp_path / "out")
    assert account["propensities"] == "estimated"
    assert "propensities: estimated" in (tmp_path / "out" / "run.toml").read_text()
    true = np.array([event.logged for event in truth.bandit_log(0, 4000)])
    assert np.abs(np.exp(rows["log_prob"]) - true).max() < 0.06


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 60)
    reply = CliRunner().invoke(trace_commands, ["import", str(path), "--out", str(tmp_path)])
    assert reply.exit_code == 2
    assert "holds something already" in reply.output


def test_a_log_that_no_environment_holds_is_recorded_whole_and_measured_by_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.goals.trace_index.MOST_LINES", COUNT // 2)
    monkeypatch.setattr("penstock.workloads.goals.trace_index.MOST_HELD", 100)
    monkeypatch.setattr("penstock.workloads.goals.trace_import.MOST_HELD", 100)
    account, rows = imported(bandit_log(tmp_path, 0, COUNT), tmp_path / "out")
    assert (account["episodes"], account["measured_by"], len(rows["action"])) == (COUNT, 100, COUNT)
    told = tomllib.loads((tmp_path / "out" / "run.toml").read_text())
    sample = Path(told["environment"]["kwargs"]["trace_file"])
    assert (sample.parent, len(sample.read_text().splitlines())) == (tmp_path / "out", 100)
    assert "from 100 episodes" in (tmp_path / "out" / "by_propensity.toml").read_text()
