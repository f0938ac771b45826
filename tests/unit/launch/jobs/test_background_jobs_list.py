"""What is listed of jobs whose files are odd."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.launch.jobs import background_jobs
from penstock.launch.jobs.background_jobs import JOB_FILE, read_jobs, stop
from penstock.launch.jobs.job_commands import job_commands
from penstock.launch.run.supervised_service import penstock
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE


def test_a_file_that_cannot_be_read_hides_no_other_job(tmp_path: Path) -> None:
    for name, text in (
        ("whole", json.dumps({"command": ["CartPole-v1"], "started": 5.0, "pid": 1, "born": 1})),
        ("empty", ""),
        ("odd", "{}"),
        ("typed", json.dumps({"command": [], "started": "now", "pid": 1, "born": 1})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / JOB_FILE).write_text(text)
    found = {one.name: one for one in read_jobs(tmp_path)}
    assert sorted(found) == ["empty", "odd", "typed", "whole"]
    assert found["whole"].cause == ""
    for name in ("empty", "odd", "typed"):
        assert (found[name].state, found[name].cause) == ("failed", "job.json cannot be read")


def test_a_job_that_is_asked_twice_to_end_gets_one_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: sent.append(pid))
    monkeypatch.setattr(background_jobs, "is_held", lambda _: True)
    monkeypatch.setattr(background_jobs, "_born", lambda _: 7)
    (tmp_path / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0, "pid": 12, "born": 7}))
    stop(tmp_path)
    stop(tmp_path)
    assert sent == [12]


@pytest.mark.parametrize("name", ["../other", "other/x", "..", "", ".hidden"])
@pytest.mark.parametrize("command", ["logs", "stop"])
def test_a_name_of_a_job_leads_nowhere_else(tmp_path: Path, command: str, name: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0, "pid": 1, "born": 1}))
    (other / "train.log").write_text("secret")
    (tmp_path / "runs").mkdir()
    told = CliRunner().invoke(job_commands, [command, name, "--runs", str(tmp_path / "runs")])
    assert (told.exit_code, "is no name of a folder" in told.output) == (2, True), told.output


def test_a_job_whose_start_was_killed_is_listed(tmp_path: Path) -> None:
    done = subprocess.run(
        penstock("jobs", "start", "--name", "a", "--runs", str(tmp_path), "no-environment"),
        env=os.environ | {FAILPOINTS_VARIABLE: "jobs.started=kill"},
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    assert [(one.name, one.command) for one in read_jobs(tmp_path)] == [("a", ["no-environment"])]


def test_a_job_whose_process_is_not_known_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_jobs, "is_held", lambda _: True)
    (tmp_path / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0, "pid": 0, "born": 0}))
    with pytest.raises(Fatal, match="penstock control stop"):
        stop(tmp_path)
