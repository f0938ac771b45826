"""A look at a process from outside, with the port that every process serves."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.launch.inspection.processes import (
    is_alive,
    is_going_on,
    look,
    look_at_all,
    observe,
    read_learnt,
)
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Endpoint, Health, read_endpoint, serve_http
from penstock.v1 import control_pb2

SERVICE = """
import sys
from penstock.runtime import metrics
from penstock.runtime.health import Health, announce, serve_http
health = Health("launcher")
metrics.RESTARTS.labels("actor").inc(2)
_, port = serve_http(health, "127.0.0.1", 0)
announce("launcher", metrics_port=port)
sys.stdin.read()
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Endpoint]]:
    """A process that serves health and metrics, as a launcher does."""
    file = tmp_path / "endpoint.json"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        stdin=subprocess.PIPE,
        env=os.environ | {"PENSTOCK_ENDPOINT_FILE": str(file)},
    )
    pause = threading.Event()
    while (endpoint := read_endpoint(file)) is None:
        assert process.poll() is None
        pause.wait(0.02)
    yield process, endpoint
    process.kill()
    process.communicate()


def announce(folder: Path) -> None:
    """Write `endpoints.json` as the launcher does."""
    (folder / "endpoints.json").write_text(f'{{"launcher": {(folder / "endpoint.json").read_text()}}}')


def test_a_process_that_is_well_is_read(
    service: tuple["subprocess.Popen[bytes]", Endpoint], tmp_path: Path
) -> None:
    _, endpoint = service
    announce(tmp_path)
    (seen,) = look_at_all(tmp_path)
    assert (seen.problem, seen.ended, seen.pid) == ("", False, endpoint.pid)
    assert seen.total("restarts_total", role="actor") == 2
    assert seen.total("restarts_total", role="learner") is None
    assert seen.total("no_such_metric") is None


def test_a_process_that_was_stopped_is_named_without_waiting_for_it(
    service: tuple["subprocess.Popen[bytes]", Endpoint],
) -> None:
    process, endpoint = service
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert look("launcher", endpoint, time.time()).problem == "stands still: stopped by a signal"
    process.send_signal(signal.SIGCONT)
    assert look("launcher", endpoint, time.time()).problem == ""


def test_a_process_that_has_ended_is_named_and_the_run_goes_on_no_longer(
    service: tuple["subprocess.Popen[bytes]", Endpoint], tmp_path: Path
) -> None:
    process, endpoint = service
    announce(tmp_path)
    assert is_going_on(tmp_path)
    process.kill()
    process.wait()
    seen = look("launcher", endpoint, time.time())
    assert (seen.ended, seen.problem) == (True, "has ended")
    assert not is_alive(endpoint.pid)
    assert not is_going_on(tmp_path)


def test_a_pid_that_was_given_to_another_process_is_no_life_sign(
    service: tuple["subprocess.Popen[bytes]", Endpoint],
) -> None:
    process, endpoint = service
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert look("launcher", endpoint, time.time() - 3600).ended
    process.send_signal(signal.SIGCONT)
    # One that answers in its role is itself, whatever a clock that was set says.
    assert not look("launcher", endpoint, time.time() - 3600).ended


def test_a_red_process_says_why_and_another_ones_port_is_no_answer() -> None:
    health = Health("launcher")
    health.fail("the disk is full")
    server, port = serve_http(health, "127.0.0.1", 0)
    try:
        own = Endpoint(role="launcher", pid=os.getpid(), metrics_port=port)
        seen = look("launcher", own, time.time())
        assert (seen.problem, seen.ended) == ("the disk is full", False)
        assert seen.samples
        learner = Endpoint(role="learner", pid=os.getpid(), metrics_port=port)
        other = look("learner", learner, time.time())
        assert (other.ended, other.samples) == (True, ())
    finally:
        server.shutdown()
        server.server_close()


def test_a_run_without_anything_to_see_is_seen_as_such(tmp_path: Path) -> None:
    def no_broker() -> control_pb2.StatusReply:
        raise Fatal("no broker has come up yet")

    seen = observe(tmp_path, no_broker)
    assert (seen.sights, seen.status, seen.silence, seen.learnt) == (
        (),
        None,
        "no broker has come up yet",
        None,
    )


def test_the_last_update_is_the_first_line_that_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"updates": 1, "time": 10}\n{"updates": 2, "time": 11}\n{"upda\n'
        '{"updates": 2, "time": 12}\n{"updates": 2, "time": 13}\n{"updates": 3, "ti'
    )
    learnt = read_learnt(path)
    assert learnt is not None
    assert (learnt.row["time"], learnt.update_at) == (13, 11)
