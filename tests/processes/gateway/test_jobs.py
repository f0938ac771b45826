"""Jobs as their users see them: through a gateway that is killed in each of their states, and when processes,
the disk and the database around it fail.
"""

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

import httpx2
import psutil
import pytest

from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_records import CannotBegin, Job, Outcome, Stage
from penstock.gateway.store.tables import JobState
from penstock.launch.gateway.local_runner import ESTIMATE_S, LocalRunner
from penstock.launch.jobs.local_job import MAX_STARTS
from penstock.registry.records import Unavailable
from tests.support.gateway.gateway_stand import (
    JOBS,
    LONG,
    PASSWORD,
    Client,
    end_jobs,
    is_training,
    operator,
    sign_in,
    trainings,
    until,
)
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import SmallGateway
from tests.support.run.harness import PATIENCE_S, GatewayProcess
from tests.support.storage.postgresql_server import find_programs, own_server
from tests.support.storage.small_disk import can_mount, small_disk


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_templates(tmp_path / "templates")
    yield tmp_path
    end_jobs(tmp_path)


def started(folder: Path) -> GatewayProcess:
    return GatewayProcess(folder, "--templates", "templates")


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
    with contextlib.suppress(httpx2.TransportError):
        client.http.post("/api/projects/alpha/estimates", json=body, timeout=PATIENCE_S)


def test_a_training_is_submitted_followed_and_finished(folder: Path, token: str) -> None:
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


def test_a_job_whose_processes_are_killed_is_reported_as_lost(folder: Path, token: str) -> None:
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


def test_a_job_that_was_taken_and_never_begun_is_begun(folder: Path, token: str) -> None:
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


def test_a_job_that_holds_its_lock_continues_and_is_not_begun_again(folder: Path) -> None:
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


def test_only_one_gateway_at_a_time_holds_a_place(folder: Path) -> None:
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


class Place:
    """A gateway's database and its dispatcher, which looks when a test says so."""

    def __init__(self, folder: Path, url: str = "") -> None:
        write_templates(folder / "templates")
        self.runner = LocalRunner(folder / "jobs", folder / "templates")
        self.gateway = SmallGateway.in_folder(folder, url, runner=self.runner)
        self.dispatcher = self.gateway.dispatcher

    def submit(self, agent: str) -> Job:
        return self.gateway.submit(agent, numbers={"maxSteps": 2})

    def cancel(self, job: Job) -> None:
        self.gateway.accounts.run(
            lambda session, now: job_queue.cancel(session, now, "alpha", job.id, by="user/ada")
        )

    def ended(self, job: Job) -> Job:
        def has_ended() -> bool:
            self.dispatcher.look()
            return not self.gateway.job(job).state.is_open

        until(has_ended)
        return self.gateway.job(job)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)
    end_jobs(tmp_path)


def holder(folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.Popen(["sleep", "600"], pass_fds=(lock.fileno(),), start_new_session=True)


def test_a_process_that_never_begins_is_started_a_few_times(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = place.submit("one"), place.submit("two")
    with monkeypatch.context() as broken:
        broken.setenv("PYTHONHOME", str(tmp_path))  # where no interpreter finds its library
        found = place.ended(job)
    assert found.state is JobState.FAILED
    assert f"ended {MAX_STARTS} times" in found.cause
    assert "no Python frame" in found.cause
    assert (place.runner.folder(job.id) / "starts").read_bytes() == b"." * MAX_STARTS
    assert place.ended(other).state is JobState.FINISHED


def test_a_cancellation_reaches_a_process_that_has_just_begun(place: Place) -> None:
    job = place.submit("one")
    folder = place.runner.folder(job.id)
    begun = holder(folder)
    try:
        place.dispatcher.look()
        assert place.gateway.job(job).state is JobState.RUNNING
        assert place.runner.find(job.id) is Stage.GOING_ON
        place.cancel(job)
        place.dispatcher.look()
        assert begun.poll() is None
        (folder / "begun.json").write_text(json.dumps({"group": begun.pid}))
        place.dispatcher.look()
        assert begun.wait(PATIENCE_S) == -signal.SIGTERM
        assert place.ended(job).state is JobState.CANCELLED
    finally:
        if begun.poll() is None:
            os.killpg(begun.pid, signal.SIGKILL)
            begun.wait()


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")
def test_a_full_disk_fails_a_job_with_its_cause(place: Place) -> None:
    job = place.submit("one")
    with small_disk("tmpfs", place.runner.folder(job.id), lambda: None) as disk:
        disk.fill(0)
        found = place.ended(job)
    assert found.state is JobState.FAILED
    assert "No space left on device" in found.cause


@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_jobs_continue_while_the_database_is_gone(tmp_path: Path) -> None:
    with own_server() as server:
        place = Place(tmp_path, server.new_database("gateway"))
        job = place.submit("one")
        place.dispatcher.look()
        server.stop()
        with pytest.raises(Unavailable):
            place.dispatcher.look()
        until((place.runner.folder(job.id) / "ended.json").exists)
        server.start()
        assert place.ended(job).state is JobState.FINISHED
    end_jobs(tmp_path)
