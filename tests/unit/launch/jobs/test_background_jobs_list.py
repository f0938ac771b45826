"""What is listed of jobs whose files are odd."""

import json
import os
from pathlib import Path

import pytest

from launch.jobs import background_jobs
from launch.jobs.background_jobs import JOB_FILE, read_jobs, stop


def test_a_file_that_cannot_be_read_hides_no_other_job(tmp_path: Path) -> None:
    """Such a job has failed, and says why."""
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
    """The second would end it without its last checkpoint."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: sent.append(pid))
    monkeypatch.setattr(background_jobs, "is_held", lambda _: True)
    monkeypatch.setattr(background_jobs, "_born", lambda _: 7)
    (tmp_path / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0, "pid": 12, "born": 7}))
    stop(tmp_path)
    stop(tmp_path)
    assert sent == [12]
