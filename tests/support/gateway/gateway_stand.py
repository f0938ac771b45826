import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil
import pytest

from penstock.gateway.jobs.job_records import Stage
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import PATIENCE_S, GatewayProcess

PASSWORD: Final = "correct horse battery"  # noqa: S105 - only the tests'
JOBS: Final = "/api/projects/alpha/jobs"
LONG: Final = 100_000


def end_jobs(folder: Path) -> None:
    """Kill what lives of the jobs of every gateway below a folder."""
    for begun in folder.rglob("jobs/*/begun.json"):
        jobs = begun.parents[1]
        templates = folder / "no-templates"
        if LocalRunner(jobs, templates).find(begun.parent.name) is Stage.GOING_ON:
            group = json.loads(begun.read_text())["group"]
            os.killpg(group, signal.SIGKILL)


def operator(folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command of the operator, in a folder."""
    return subprocess.run(
        penstock("gateway", *words), cwd=folder, input=stdin, capture_output=True, text=True, check=False
    )


def new_token(folder: Path, project: str, *options: str) -> str:
    """A token of a program in a project that its owner, ada, adds. options: where the accounts are."""
    added = operator(folder, "user", "add", "ada", "--project", project, *options, stdin=f"{PASSWORD}\n")
    assert added.returncode == 0, added.stderr
    done = operator(folder, "token", "add", "program", "--project", project, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sign_in(gateway: GatewayProcess) -> dict[str, Any]:
    form = {"grant_type": "password", "username": "ada", "password": PASSWORD}
    reply = httpx2.post(f"{gateway.url}/api/auth/token", data=form, timeout=30)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


class Client:
    """An editor of `alpha` at a gateway."""

    def __init__(self, gateway: GatewayProcess, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx2.Client(base_url=gateway.url, headers=headers, timeout=60)

    def submit(self, agent: str, template: str = "quick", steps: int = 2, key: str = "") -> dict[str, Any]:
        numbers = {"maxSteps": steps} if template == "quick" else {}
        body = {"agent": agent, "template": template, "numbers": numbers}
        headers = {"Idempotency-Key": key} if key else {}
        reply = self.http.post(JOBS, json=body, headers=headers)
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def job(self, job: dict[str, Any]) -> dict[str, Any]:
        return dict(self.http.get(f"{JOBS}/{job['id']}").json())

    def cancel(self, job: dict[str, Any]) -> None:
        assert self.http.post(f"{JOBS}/{job['id']}/cancel").status_code == 200

    def events(self, job: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        with self.http.stream("GET", f"{JOBS}/{job['id']}/log", timeout=PATIENCE_S) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            kind = ""
            for line in reply.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield kind, json.loads(line.removeprefix("data: "))

    def ended(self, job: dict[str, Any]) -> dict[str, Any]:
        *_, (kind, _) = self.events(job)
        assert kind == "state"
        return self.job(job)


def trainings(folder: Path, job: dict[str, Any]) -> list[psutil.Process]:
    place = folder / "gateway-state" / "jobs" / job["id"]
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        is_around = "penstock.launch.jobs.job_process" in words
        if process.info["cwd"] == str(place) and "train" in words and not is_around:
            found.append(process)
    return found


def is_training(folder: Path, job: dict[str, Any]) -> bool:
    file = folder / "gateway-state" / "jobs" / str(job["id"]) / "run" / "metrics.jsonl"
    return file.exists() and file.stat().st_size > 0


def until(holds: Callable[[], Any]) -> None:
    """Return when something holds."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.1)):
        if holds():
            return
        pause.wait(0.1)
    pytest.fail("it did not come to hold")
