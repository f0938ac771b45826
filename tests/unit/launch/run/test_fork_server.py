"""A service that is a copy of the fork server has what a program has that the launcher starts."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.fork_server import PID, ForkServer
from penstock.launch.run.supervisor import penstock
from tests.support.run.training import is_alive

REFUSED = penstock("actor", "--broker", "127.0.0.1:1", "--actor-id", "not an id")
"""Ends at once, with a line in its log."""
WAITS = penstock("broker", "--redis", "unix:///nowhere/redis.sock", "--listen", "127.0.0.1:0")


@dataclass(frozen=True, slots=True)
class Place:
    """Where copies write, and the launcher's lifeline."""

    log: Path
    lifeline: int
    server: ForkServer

    def start(self, command: tuple[str, ...], environment: Mapping[str, str] | None = None) -> int:
        """Pid of a copy."""
        with self.log.open("ab") as log:
            pid = self.server.start(command, environment or dict(os.environ), log.fileno(), self.lifeline)
        assert pid is not None, "the server had more than one thread, or has failed"
        return pid


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A server and a lifeline that stays open."""
    reading, writing = os.pipe()
    with closing(ForkServer()) as server:
        yield Place(tmp_path / "service.log", reading, server)
    os.close(reading)
    os.close(writing)


def ended(pid: int) -> int:
    """Exit code of a child of this process, as it ends."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fields(pid: int) -> dict[str, str]:
    """What the kernel tells of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_copy_is_a_child_of_the_launcher_and_known_by_its_command_line(place: Place) -> None:
    pid = place.start(WAITS)
    assert int(fields(pid)["PPid"]) == os.getpid()
    assert os.getpgid(pid) == pid
    place_of_words = Path(f"/proc/{pid}/cmdline")
    while b"penstock.launch.cli broker" not in place_of_words.read_bytes():
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, place.log.read_text()
    assert place_of_words.read_bytes().rstrip(b"\0").decode() == " ".join(WAITS)
    os.killpg(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL


def test_a_copy_writes_to_its_log_and_ends_with_its_exit_code(place: Place) -> None:
    for times in (1, 2):
        assert ended(place.start(REFUSED)) == 2
        assert place.log.read_text().count("Invalid value for '--actor-id'") == times
        assert place.log.read_text().count("Usage: python -m penstock.launch.cli actor") == times


def test_a_copy_has_the_environment_that_it_is_given_and_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"PATH": os.environ["PATH"], "PENSTOCK_METRICS__PORT": "no port"}
    assert ended(place.start(WAITS, known)) == 2
    assert "metrics.port='no port'" in place.log.read_text()
    monkeypatch.setenv("PENSTOCK_METRICS__PORT", "no port")
    with closing(ForkServer()) as mistaken:
        other = Place(place.log, place.lifeline, mistaken)
        pid = other.start(WAITS, {"PATH": known["PATH"]})
        while place.log.read_text().count("waiting for redis") < 1:
            assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        os.kill(pid, signal.SIGKILL)
        ended(pid)


def test_a_copy_sees_its_lifeline_close(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with closing(ForkServer()) as server:
        place = Place(tmp_path / "service.log", reading, server)
        pid = place.start(WAITS)
        os.close(writing)
        assert ended(pid) == 0
        assert "draining" in place.log.read_text()
    os.close(reading)


def test_a_copy_that_is_told_nothing_is_nothing(place: Place) -> None:
    told, telling = os.pipe()
    with place.log.open("ab") as log, os.fdopen(told) as reader, socket_of(place.server) as server:
        socket.send_fds(server, [b"\0"], [reader.fileno(), log.fileno(), place.lifeline])
        (pid,) = PID.unpack(server.recv(PID.size, socket.MSG_WAITALL))
    assert is_alive(pid), "it waits"
    os.close(telling)
    while is_alive(pid):
        pass
    assert place.log.read_bytes() == b""


def socket_of(server: ForkServer) -> socket.socket:
    """A second end of the launcher's connection."""
    return server._socket.dup()


@pytest.mark.parametrize("command", [penstock("serve"), penstock("--help"), ("/bin/true",)])
def test_what_the_server_has_not_imported_is_started_as_a_program(
    command: tuple[str, ...], place: Place
) -> None:
    with place.log.open("ab") as log:
        assert place.server.start(command, os.environ, log.fileno(), place.lifeline) is None


def test_without_the_server_services_are_programs(place: Place) -> None:
    pid = place.server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with place.log.open("ab") as log:
        assert place.server.start(WAITS, os.environ, log.fileno(), place.lifeline) is None
        assert place.server.start(WAITS, os.environ, log.fileno(), place.lifeline) is None
    assert place.server.pid is None


def test_nobody_waits_for_a_server_that_was_given_up(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.launch.run.fork_server")
    pid = place.server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    giving_up = threading.Thread(target=place.server.give_up)
    giving_up.start()
    with place.log.open("ab") as log:
        assert place.server.start(WAITS, os.environ, log.fileno(), place.lifeline) is None
    giving_up.join()
    (said,) = caplog.records
    assert not isinstance(said.__dict__["error"], TimeoutError)
    place.server.give_up()


class KillsCopies(ForkServer):
    """A server whose copies die before they are told what to be."""

    def _fork(self, descriptors: Sequence[int]) -> int:
        pid = super()._fork(descriptors)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["in one write", "more than a pipe holds"])
def test_a_copy_that_is_killed_before_it_is_told_is_a_service_that_has_died(
    size: int, place: Place, tmp_path: Path
) -> None:
    with closing(KillsCopies()) as server:
        other = Place(tmp_path / "killed.log", place.lifeline, server)
        assert ended(other.start(WAITS, {"LARGE": "x" * size})) == -signal.SIGKILL


NAMELESS: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
words = [word.encode() for word in sys.argv[1:]]
pairs = [f"{name}={value}".encode() for name, value in os.environ.items()] + [b"=nameless"]
argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
environment = (ctypes.c_char_p * (len(pairs) + 1))(*pairs, None)
libc.execve(words[0], argv, environment)
"""
"""Becomes a program whose environment has a variable with no name, which Python itself gives to none."""
STARTS: Final = """
import os, sys
from penstock.launch.run.supervisor import penstock
from penstock.launch.run.fork_server import ForkServer
assert os.environ[""] == "nameless"
server = ForkServer()
with open(sys.argv[1], "ab") as log:
    command = penstock("actor", "--broker", "127.0.0.1:1", "--actor-id", "not an id")
    pid = server.start(command, os.environ, log.fileno(), 0)
server.close()
sys.exit(99 if pid is None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_variable_without_a_name_keeps_no_service_from_starting(tmp_path: Path) -> None:
    python = (sys.executable, "-P", "-c")
    log = tmp_path / "service.log"
    words = (*python, NAMELESS, *python, STARTS, str(log))
    ends = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ends.returncode == 2, ends.stderr
    assert "Invalid value for '--actor-id'" in log.read_text()


def test_services_go_on_when_the_server_ends(place: Place) -> None:
    pid, server = place.start(WAITS), place.server.pid
    place.server.close()
    assert server is not None
    assert not is_alive(server)
    assert place.server.cpu_seconds > 0
    assert place.server.memory.inherited > 0
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    os.kill(pid, signal.SIGKILL)
    ended(pid)
