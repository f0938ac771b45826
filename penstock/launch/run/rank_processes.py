"""The other ranks of a learner on this machine: `learner.ranks` = N is N processes, this one included.

Does for one machine what torchrun's agent does, with less: a store on loopback at which the ranks meet, and
this process's own command line once more for each rank beyond 0, with what torchrun would have put into
their environment. They end when this one does, in whatever way; when one of them dies this one ends too, at
once and with exit 1, for no update can be made without it. The supervisor of this one starts all again.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.config.settings import Settings
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.lifecycle import LIFELINE_VARIABLE, leave

_END_S: Final = 10.0

log = logging.getLogger(__name__)


@contextmanager
def beside(settings: Settings) -> Iterator[None]:
    """Start ranks 1 to `learner.ranks` − 1; inside, this process is rank 0.

    It starts none for one rank, or in a process that is a rank already.

    Raises ConfigurationError, before any is started, for what several ranks do not learn.
    """
    from penstock.learner.algorithms.registry import check_hardware

    count = settings.learner.ranks
    if count == 1 or "RANK" in os.environ:
        yield
        return
    check_hardware(settings, count)
    with _store() as port:
        os.environ |= _environment(port, 0, count)
        others = _Others(count, port)
        try:
            yield
        finally:
            others.end()


@contextmanager
def _store() -> Iterator[int]:
    """The port of a store that is reached from this machine only."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its documentation

    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    try:
        yield port
    finally:
        del store


def _environment(port: int, rank: int, count: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }


class _Others:
    """Ranks beyond 0."""

    def __init__(self, count: int, port: int) -> None:
        self._ending = threading.Event()
        # The write end stays open in this process alone: the others drain when the kernel closes it.
        read_fd, self._lifeline = os.pipe()
        self._threads = []
        for rank in range(1, count):
            process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_environment(port, rank, count), LIFELINE_VARIABLE: str(read_fd)},
                pass_fds=(read_fd,),
            )
            log.info("started", extra={"rank": rank, "pid": process.pid})
            thread = threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        os.close(read_fd)

    def end(self) -> None:
        """Wait for the ranks that were told to end; the lifeline tells the others."""
        self._ending.set()
        os.close(self._lifeline)
        for thread in self._threads:
            thread.join(_END_S)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if code != EXIT_OK and not self._ending.is_set():
            sys.stderr.write(
                f"rank {rank} of this learner ended ({code}): no update can be made without it\n"
            )
            leave(EXIT_FAILED)
