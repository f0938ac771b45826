"""What is listed of jobs whose files are odd."""

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.config.run_folder import LOCK_FILE as RUN_LOCK_FILE
from penstock.launch.jobs.job_commands import JOB_FILE, job_commands, read_named, stop_named
from penstock.launch.jobs.job_process import BEGUN_FILE
from penstock.launch.jobs.local_job import LOCK_FILE
from penstock.launch.run.supervisor import penstock
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE


def test_a_file_that_cannot_be_read_hides_no_other_job(tmp_path: Path) -> None:
    for name, text in (
        ("whole", json.dumps({"command": ["CartPole-v1"], "started": 5.0})),
        ("empty", ""),
        ("odd", "{}"),
        ("typed", json.dumps({"command": [], "started": "now"})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / JOB_FILE).write_text(text)
    found = {one.name: one for one in read_named(tmp_path)}
    assert sorted(found) == ["empty", "odd", "typed", "whole"]
    assert found["whole"].cause == ""
    for name in ("empty", "odd", "typed"):
        assert (found[name].state, found[name].cause) == ("failed", "job.json cannot be read")


def test_a_job_that_is_asked_twice_to_end_gets_one_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: sent.append(group))
    (tmp_path / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0}))
    (tmp_path / BEGUN_FILE).write_text(json.dumps({"group": 12}))
    with (tmp_path / LOCK_FILE).open("w") as job, (tmp_path / RUN_LOCK_FILE).open("w") as run:
        fcntl.flock(job, fcntl.LOCK_EX)
        fcntl.flock(run, fcntl.LOCK_EX)
        stop_named(tmp_path)
        stop_named(tmp_path)
    assert sent == [12]


@pytest.mark.parametrize("name", ["../other", "other/x", "..", "", ".hidden"])
@pytest.mark.parametrize("command", ["logs", "stop"])
def test_a_name_of_a_job_leads_nowhere_else(tmp_path: Path, command: str, name: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0}))
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
    assert [(one.name, one.command) for one in read_named(tmp_path)] == [("a", ["no-environment"])]


def test_a_job_whose_processes_are_not_known_is_not_signalled(tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0}))
    with (tmp_path / RUN_LOCK_FILE).open("w") as run:
        fcntl.flock(run, fcntl.LOCK_EX)
        for _ in range(2):
            with pytest.raises(Fatal, match="penstock control stop"):
                stop_named(tmp_path)
