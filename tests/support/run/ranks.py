"""Several ranks for tests: real processes that meet as they do under torchrun."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its documentation

PATIENCE_S = 120.0


@contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """A store on loopback, and what torchrun's agent would put into the environment about it."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    del store


def run(size: int, command: Sequence[str]) -> list[str]:
    """What each rank of `python COMMAND…` printed; AssertionError with its words when one fails."""
    with meeting_place() as place:
        started = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": str(size)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            said = [process.communicate(timeout=PATIENCE_S) for process in started]
        finally:
            for process in started:
                process.kill()
    for process, (_, words) in zip(started, said, strict=True):
        assert process.returncode == 0, words
    return [out for out, _ in said]
