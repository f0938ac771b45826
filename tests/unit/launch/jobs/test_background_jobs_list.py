"""What is listed of jobs whose files are odd."""

import json
from pathlib import Path

from launch.jobs.background_jobs import JOB_FILE, read_jobs


def test_a_file_that_nobody_can_read_hides_no_other_job(tmp_path: Path) -> None:
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
