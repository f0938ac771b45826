"""Redis and a broker as real services in a temporary folder, for measurements."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.run.child_process import Exit, Folder, ServiceProcess, ServiceSpec, penstock
from penstock.runtime.health import Endpoint, read_endpoint

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Services:
    """Running services.

    redis_url: unix URL of the server. broker: address of the broker, "" when none was started.
    folder: temporary, with the endpoint file of each.
    """

    redis_url: str
    broker: str
    folder: Path

    def endpoint(self, role: str) -> Endpoint:
        """Return pid and ports of `redis` or `broker`."""
        endpoint = read_endpoint(self.folder / f"{role}.json")
        assert endpoint is not None
        return endpoint


@contextmanager
def services(*, durability: str, broker: bool = True) -> Iterator[Services]:
    """Start Redis with a durability (memory, fsync_1s, fsync) and a broker before it; stop both at the end.

    Raises RuntimeError with the last line of its log when one does not come up.
    """
    read_fd, write_fd = os.pipe()
    started: list[ServiceProcess] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        root = Path(name)
        url, address = f"unix://{root}/redis.sock", f"unix:{root}/broker.sock"
        settings = (
            *("--set", f"broker.durability={durability}"),
            *("--set", "broker.max_memory_bytes=4294967296"),
        )
        try:
            where = ("--socket", f"{root}/redis.sock", "--dir", f"{root}/redis")
            started.append(start("redis", penstock("redis", *where, *settings), root, read_fd))
            if broker:
                where = ("--redis", url, "--listen", address)
                started.append(start("broker", penstock("broker", *where, *settings), root, read_fd))
            yield Services(url, address if broker else "", root)
        finally:
            os.close(write_fd)
            for process in reversed(started):
                process.kill()
            os.close(read_fd)


def start(role: str, command: Sequence[str], root: Path, lifeline_fd: int) -> ServiceProcess:
    """Start a process and return it once it has announced itself in `root`.

    Raises RuntimeError when it does not come up.
    """
    ended: list[Exit] = []
    process = ServiceProcess(
        ServiceSpec(name=role, role=role, command=tuple(command)),
        folder=Folder(logs=root, endpoints=root),
        lifeline_fd=lifeline_fd,
        environment={},
        restarted=False,
        on_exit=ended.append,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not process.is_ready():
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"{role} does not come up: {process.last_line()}")
        time.sleep(0.05)
    return process
