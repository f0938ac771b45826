"""Jobs as their users see them: through a gateway that is killed in each of their states."""

import contextlib
import fcntl
import json
import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import httpx2
import psutil

from penstock.gateway.jobs.job_records import CannotBegin, Outcome, Stage
from penstock.gateway.store.tables import JobState
from penstock.launch.gateway.local_runner import ESTIMATE_S, LocalRunner
from tests.processes.gateway.test_gateway_process import (
    PASSWORD,
    new_token,
    operator,
    shared_database,
    sign_in,
)
from tests.support.gateway.job_templates import end_jobs, write_templates
from tests.support.run.harness import PATIENCE_S, GatewayProcess
from tests.support.storage.postgresql_server import find_programs

__all__ = ["shared_database"]

JOBS: Final = "/api/projects/alpha/jobs"
LONG: Final = 100_000


class Client:
    """An editor of `alpha` at a gateway."""

    def __init__(self, gateway: GatewayProcess, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx2.Client(base_url=gateway.url, headers=headers, timeout=60)

    def submit(self, agent: str, template: str = "quick", steps: int = 2, key: str = "") -> dict[str, Any]:
        """A new job."""
        numbers = {"maxSteps": steps} if template == "quick" else {}
        body = {"agent": agent, "template": template, "numbers": numbers}
        headers = {"Idempotency-Key": key} if key else {}
        reply = self.http.post(JOBS, json=body, headers=headers)
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def job(self, job: dict[str, Any]) -> dict[str, Any]:
        """It as it is now."""
        return dict(self.http.get(f"{JOBS}/{job['id']}").json())

    def cancel(self, job: dict[str, Any]) -> None:
        """Cancel it."""
        assert self.http.post(f"{JOBS}/{job['id']}/cancel").status_code == 200

    def events(self, job: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Its log, until it has ended."""
        with self.http.stream("GET", f"{JOBS}/{job['id']}/log", timeout=PATIENCE_S) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            kind = ""
            for line in reply.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield kind, json.loads(line.removeprefix("data: "))

    def ended(self, job: dict[str, Any]) -> dict[str, Any]:
        """It, once it has ended."""
        *_, (kind, _) = self.events(job)
        assert kind == "state"
        return self.job(job)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a gateway lies, with templates."""
    write_templates(tmp_path / "templates")
    yield tmp_path
    end_jobs(tmp_path)


@pytest.fixture
def token(folder: Path) -> str:
    """A token of an editor of `alpha`."""
    return new_token(folder, "alpha")


def started(folder: Path) -> GatewayProcess:
    """A gateway that runs one job at a time."""
    return GatewayProcess(folder, "--templates", "templates")


def until(holds: Any) -> None:
    """Wait until something holds."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.1)):
        if holds():
            return
        pause.wait(0.1)
    pytest.fail("it did not come to hold")


ENDLESS: Final = """
[environment]
id = "CartPole-v1"

[algorithm]
batch_steps = 1_000_000_000

[broker]
max_log_bytes = 1_000_000_000_000
max_log_entries = 100_000_000
max_memory_bytes = 2_000_000_000_000
"""
"""A template whose dry run makes no update."""


def dry_runs(folder: Path) -> list[psutil.Process]:
    """The launchers of dry runs that live."""
    jobs = str(folder / "gateway-state" / "jobs" / "estimate-")
    return [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if (process.info["cwd"] or "").startswith(jobs) and "--dry-run" in (process.info["cmdline"] or [])
    ]


def test_a_dry_run_ends_with_its_gateway(folder: Path, token: str) -> None:
    (folder / "templates" / "endless.toml").write_text(ENDLESS)
    body = {"agent": "my_agent", "template": "endless"}
    with started(folder) as gateway:
        client = Client(gateway, token)
        asked = threading.Thread(target=lambda: suppressed(client, body))
        asked.start()
        until(lambda: any(process.children() for process in dry_runs(folder)))
        gateway.process.kill()
        gateway.process.wait()
        asked.join()
    try:
        until(lambda: not dry_runs(folder))
    finally:
        for process in dry_runs(folder):
            process.kill()
    (left,) = (folder / "gateway-state" / "jobs").glob("estimate-*")
    runner = LocalRunner(folder / "gateway-state" / "jobs", folder / "templates")
    for age_s, is_there in ((ESTIMATE_S, True), (3 * ESTIMATE_S, False)):
        os.utime(left, (time.time() - age_s,) * 2)
        with pytest.raises(CannotBegin):
            runner.estimate("wrong", {}, lambda _: {})
        assert left.exists() is is_there


def suppressed(client: Client, body: dict[str, Any]) -> None:
    """Ask for a dry run at a gateway that does not live to answer."""
    with contextlib.suppress(httpx2.TransportError):
        client.http.post("/api/projects/alpha/estimates", json=body, timeout=PATIENCE_S)


def trainings(folder: Path, job: dict[str, Any]) -> list[psutil.Process]:
    """The launchers of a job that live."""
    place = folder / "gateway-state" / "jobs" / job["id"]
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        is_around = "penstock.launch.jobs.job_process" in words
        if process.info["cwd"] == str(place) and "train" in words and not is_around:
            found.append(process)
    return found


def is_training(folder: Path, job: dict[str, Any]) -> bool:
    """Whether its learner has made an update."""
    file = folder / "gateway-state" / "jobs" / str(job["id"]) / "run" / "metrics.jsonl"
    return file.exists() and file.stat().st_size > 0


def test_a_training_is_asked_for_followed_and_finished(folder: Path, token: str) -> None:
    with started(folder) as gateway:
        client = Client(gateway, token)
        first, wrong = client.submit("one", key="k-1"), client.submit("two", "wrong")
        assert client.submit("one", key="k-1")["id"] == first["id"]
        assert client.http.post(JOBS, json={"agent": "one", "template": "quick"}).status_code == 409
        events = list(client.events(first))
        assert any("training" in str(data) for kind, data in events if kind == "line")
        assert events[-1] == ("state", {"state": "finished", "cause": ""})
        found = client.job(first)
        assert found["result"]["updates"] >= 2
        failed = client.ended(wrong)
        assert failed["state"] == "failed"
        assert "No-such-environment-v0" in failed["cause"]
        assert failed["began"] >= found["ended"]


def test_a_gateway_that_is_killed_finds_its_jobs_again(folder: Path, token: str) -> None:
    with started(folder) as gateway:
        client = Client(gateway, token)
        running, queued = client.submit("one", steps=LONG), client.submit("two")
        until(lambda: is_training(folder, running))
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
    (training,) = trainings(folder, running)
    with started(folder) as gateway:
        client = Client(gateway, token)
        assert client.job(running)["state"] == "running"
        assert trainings(folder, running) == [training]
        client.cancel(running)
        assert client.ended(running)["state"] == "cancelled"
        assert trainings(folder, running) == []
        until(lambda: client.job(queued)["state"] == "running")
        until(lambda: is_training(folder, queued))
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
    ended = folder / "gateway-state" / "jobs" / queued["id"] / "ended.json"
    until(ended.exists)
    with started(folder) as gateway:
        assert Client(gateway, token).ended(queued)["state"] == "finished"
        log = (folder / "gateway-state" / "jobs" / queued["id"] / "train.log").read_text()
        assert log.count("starting") == 1, log


def test_a_job_whose_processes_are_killed_is_lost_and_said_to_be(folder: Path, token: str) -> None:
    with started(folder) as gateway:
        client = Client(gateway, token)
        job = client.submit("one", steps=LONG)
        until(lambda: is_training(folder, job))
        (training,) = trainings(folder, job)
        around = training.parent()
        assert around is not None
        around.kill()
        training.kill()
        found = client.ended(job)
        assert (found["state"], found["result"]) == ("lost", None)
        assert "were killed" in found["cause"]
        assert client.ended(client.submit("one"))["state"] == "finished"


@pytest.mark.slow
@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_two_gateways_on_one_database_run_each_job_once(shared_database: str, folder: Path) -> None:
    options = ("--database", shared_database, "--registry", shared_database, "--keys", str(folder / "keys"))
    secret = new_token(folder, "alpha", *options[:2], *options[4:])
    states = [folder / name for name in ("one", "two")]
    begun = [
        GatewayProcess(folder, *options, "--state", str(state), "--templates", "templates")
        for state in states
    ]
    with begun[0] as one, begun[1] as two:
        clients = [Client(gateway, secret) for gateway in (one, two)]
        jobs = [clients[number % 2].submit(f"agent-{number}") for number in range(3)]
        until(lambda: all(clients[0].job(job)["state"] == "finished" for job in jobs))
    for job in jobs:
        assert sum((state / "jobs" / job["id"] / "begun.json").exists() for state in states) == 1
    assert all(any((state / "jobs" / job["id"]).exists() for job in jobs) for state in states)


def test_what_was_taken_and_never_begun_is_begun(folder: Path, token: str) -> None:
    with started(folder) as gateway:
        client = Client(gateway, token)
        blocker = client.submit("one", steps=LONG)
        until(lambda: client.job(blocker)["state"] == "running")
        job = client.submit("two")
        client.cancel(blocker)
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
    state = folder / "gateway-state"
    with sqlite3.connect(state / "accounts.sqlite") as database:
        place = (state / "jobs" / "place").read_text()
        database.execute("UPDATE jobs SET state = 'running', place = ? WHERE id = ?", (place, job["id"]))
    with started(folder) as gateway:
        client = Client(gateway, token)
        until(lambda: client.job(job)["state"] == "finished")
        assert client.job(blocker)["state"] == "cancelled"


def test_what_holds_the_lock_goes_on_and_what_was_begun_is_not_begun_again(folder: Path) -> None:
    runner = LocalRunner(folder / "jobs", folder / "templates")
    assert runner.find("a") is Stage.NOT_BEGUN
    place = runner.folder("a")
    with (place / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        holder = subprocess.Popen(["sleep", "600"], pass_fds=(lock.fileno(),))
    try:
        assert runner.find("a") is Stage.GOING_ON
    finally:
        holder.kill()
        holder.wait()
    assert runner.find("a") is Stage.NOT_BEGUN
    (place / "begun.json").write_text(json.dumps({"group": holder.pid}))
    found = runner.find("a")
    assert isinstance(found, Outcome)
    assert found.state is JobState.LOST


def test_one_gateway_at_a_time_has_a_place(folder: Path) -> None:
    first, second = (LocalRunner(folder / "jobs", folder / "templates") for _ in range(2))
    assert first.place == second.place
    with first.hold() as own, second.hold() as other:
        assert (own, other) == (True, False)
    with second.hold() as own:
        assert own


def test_a_run_is_steered_and_the_audit_names_the_operator(folder: Path, token: str) -> None:
    operator(folder, "user", "add", "ada", "--project", "alpha", stdin=f"{PASSWORD}\n")
    with started(folder) as gateway:
        client = Client(gateway, token)
        job = client.submit("one", steps=LONG)
        until(lambda: is_training(folder, job))

        def order(action: str, **body: Any) -> dict[str, Any]:
            reply = client.http.post(f"{JOBS}/{job['id']}/control/{action}", json=body)
            assert reply.status_code == 200, reply.text
            return dict(reply.json())

        def answered(action: str, **body: Any) -> dict[str, Any]:
            until(lambda: order(action, **body)["state"] != "COMMAND_STATE_PENDING")
            return order(action, **body)

        assert order("pause")["desired"] == "paused"
        assert order("resume")["desired"] == "running"
        kept = answered("checkpoint", name="good", requestId="r-1")
        assert kept["state"] == "COMMAND_STATE_DONE", kept
        assert answered("restore", name="good", requestId="r-2")["state"] == "COMMAND_STATE_DONE"
        assert answered("restore", name="absent", requestId="r-3")["state"] == "COMMAND_STATE_REFUSED"
        path = client.http.post(f"{JOBS}/{job['id']}/control/checkpoint", json={"name": "../../etc"})
        assert (path.status_code, path.json()["field"]) == (422, "name")
        order("stop")
        assert client.ended(job)["state"] == "cancelled"
        found = client.http.get(f"{JOBS}/{job['id']}/versions").json()["versions"]
        newest = found[-1]["version"]
        body = {"version": newest, "reason": "looks good"}
        promoted = client.http.post(f"{JOBS}/{job['id']}/promote", json=body)
        assert (promoted.status_code, promoted.json()["status"]) == (200, "active"), promoted.text
        assert client.http.post(f"{JOBS}/{job['id']}/control/pause", json={}).status_code == 409
        person = {"Authorization": f"Bearer {sign_in(gateway)['access_token']}"}
        audit = httpx2.get(f"{gateway.url}/api/projects/alpha/audit", headers=person, timeout=60).json()
        rows = [entry["action"] for entry in audit["entries"] if entry["by"].startswith("token/")]
        assert {"run: pause", "run: resume", "run: checkpoint", "run: restore", "run: stop"} <= set(rows)
        assert "promote" in rows
