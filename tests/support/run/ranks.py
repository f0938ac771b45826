"""Several ranks for tests: real processes that meet as they do under torchrun."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its documentation

from tests.support.run.forked_process import MODULE, ForkedProcess

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


def run(size: int, folder: Path, module: str, *words: str) -> None:
    """Run each rank of `python -m MODULE WORDS…`; AssertionError with what one said that fails.

    folder: where each writes what it says.
    """
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    with meeting_place() as place:
        started = [
            ForkedProcess(
                MODULE,
                module,
                *words,
                output=log,
                environment={**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": str(size)},
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for process, log in zip(started, logs, strict=True):
                assert process.wait(PATIENCE_S) == 0, log.read_text()
        finally:
            for process in started:
                process.kill()
