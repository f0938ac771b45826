"""The dispatcher of jobs when things around it fail: processes, disk, database."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.gateway.accounts.principal import Membership, Principal
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_dispatcher import JobDispatcher
from penstock.gateway.jobs.job_records import Job, Stage
from penstock.gateway.store.tables import JobState, Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.jobs.local_job import MAX_STARTS
from penstock.registry.records import Unavailable
from tests.support.gateway.job_templates import end_jobs, write_templates
from tests.support.gateway.small_gateway import SmallGateway
from tests.support.storage.postgresql_server import PostgresqlServer, find_programs
from tests.support.storage.small_disk import can_mount, small_disk

PATIENCE_S = 150.0
MEMBER = Membership(
    principal=Principal(subject="user/ada", name="ada", user="ada"), project="alpha", role=Role.EDITOR
)


class Place:
    """A gateway's database and its dispatcher, which looks when a test says so."""

    def __init__(self, folder: Path, url: str = "") -> None:
        write_templates(folder / "templates")
        self.runner = LocalRunner(folder / "jobs", folder / "templates")
        self.gateway = SmallGateway.at(
            url or f"sqlite:///{folder}/accounts.sqlite",
            f"sqlite:///{folder}/registry.sqlite",
            folder,
            runner=self.runner,
        )
        assert self.gateway.parts.dispatcher is not None
        self.dispatcher: JobDispatcher = self.gateway.parts.dispatcher

    def submit(self, agent: str) -> Job:
        """A new job of two updates."""
        return self.gateway.accounts.run(
            lambda session, now: job_queue.submit(
                session, now, MEMBER, agent=agent, template="quick", numbers={"maxSteps": 2}, facts={}
            )
        )

    def cancel(self, job: Job) -> None:
        """Somebody wants it to end."""
        self.gateway.accounts.run(
            lambda session, now: job_queue.cancel(session, now, "alpha", job.id, by="user/ada")
        )

    def now(self, job: Job) -> Job:
        """It as its row is."""
        return self.gateway.accounts.look(lambda session: job_queue.get(session, "alpha", job.id))

    def ended(self, job: Job) -> Job:
        """It, once the dispatcher has seen it end."""

        def has_ended() -> bool:
            self.dispatcher.look()
            return not self.now(job).state.is_open

        until(has_ended)
        return self.now(job)


def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        if holds():
            return
        pause.wait(0.05)
    pytest.fail("it did not come to hold")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """One on SQLite."""
    yield Place(tmp_path)
    end_jobs(tmp_path)


def holder(folder: Path) -> "subprocess.Popen[bytes]":
    """What holds the lock of a job and has noted nothing yet, as its process in its first moments."""
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
        assert place.now(job).state is JobState.RUNNING
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
def test_a_full_disk_fails_a_job_and_says_so(place: Place) -> None:
    job = place.submit("one")
    with small_disk("tmpfs", place.runner.folder(job.id), lambda: None) as disk:
        disk.fill(0)
        found = place.ended(job)
    assert found.state is JobState.FAILED
    assert "No space left on device" in found.cause


@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_jobs_go_on_while_the_database_is_gone(tmp_path: Path) -> None:
    programs = find_programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))
    server = PostgresqlServer(programs, folder)
    try:
        server.start()
        place = Place(tmp_path, server.new_database("gateway"))
        job = place.submit("one")
        place.dispatcher.look()
        server.stop()
        with pytest.raises(Unavailable):
            place.dispatcher.look()
        until((place.runner.folder(job.id) / "ended.json").exists)
        server.start()
        assert place.ended(job).state is JobState.FINISHED
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
        end_jobs(tmp_path)
