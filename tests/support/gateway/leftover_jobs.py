"""Ends the jobs that a test leaves behind: they do not end with their gateway, by design."""

import json
import os
import signal
from pathlib import Path

from penstock.gateway.jobs.job_records import Stage
from penstock.launch.gateway.local_runner import LocalRunner


def end_jobs(folder: Path) -> None:
    """Kill what lives of the jobs of every gateway below a folder."""
    for begun in folder.rglob("jobs/*/begun.json"):
        jobs = begun.parents[1]
        templates = folder / "no-templates"
        if LocalRunner(jobs, templates).find(begun.parent.name) is Stage.GOING_ON:
            group = json.loads(begun.read_text())["group"]
            os.killpg(group, signal.SIGKILL)
