"""The launcher's side of its fork server: services begin as copies of a process that has imported them.

Each service would import settings, numpy, gRPC and the rest for itself: half a second of a core, five times,
before the first step of a run. The server (`penstock.launch.run.forked_service`) does so once, beside the
launcher's own start, and a service is a copy of it that goes on as its command line would. What was imported
lies in memory once, until somebody writes to it.

A copy is a child of the launcher, as a started program would be: the server forks twice, and the kernel gives
the orphan to the nearest ancestor that asks for such. The copy begins when the launcher tells it what to be,
so a launcher that gave up waiting can start the service in the other way and does not get it twice.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from penstock.launch.run.memory import Memory, of_fork_server

PENSTOCK: Final = (sys.executable, "-P", "-m", "penstock.launch.cli")
"""The command line of `penstock` by this interpreter; -P: a folder here hides no package."""
_FORKED: Final = frozenset((*PENSTOCK, command) for command in ("redis", "broker", "learner", "actor"))
"""What the server can be. A policy server it cannot: that sets what gRPC reads as it is loaded."""
PID: Final = struct.Struct("=i")
_PATIENCE_S: Final = 30.0
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)
log = logging.getLogger(__name__)


class ForkServer:
    """A process that has imported what services import. Methods belong to one thread, `give_up` to any.

    cpu_seconds, memory: what it has used, once it has ended.
    """

    def __init__(self) -> None:
        """Start it; returns before it has imported anything."""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_PATIENCE_S)
        with theirs:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                (sys.executable, "-P", "-m", "penstock.launch.run.forked_service", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_settable(os.environ),
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        self.cpu_seconds = 0.0
        self.memory = Memory()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log_fd: int, lifeline_fd: int
    ) -> int | None:
        """Begin what a command line says, in a process group of its own; return its pid.

        None where it has to be started as a program: it is another command, or there is no server any more.
        environment: all that it has. log_fd: where it writes. lifeline_fd: see `penstock.runtime.lifecycle`.
        """
        if self._process is None or tuple(command[: len(PENSTOCK) + 1]) not in _FORKED:
            return None
        told, telling = os.pipe()
        # It was killed before it has read all: who waits for its end sees that.
        with suppress(BrokenPipeError), os.fdopen(telling, "w") as words:
            try:
                with os.fdopen(told) as reader:
                    pid = self._fork([reader.fileno(), log_fd, lifeline_fd])
            except OSError as error:
                log.info("services are started as programs: the fork server is gone", extra={"error": error})
                self.close()
                return None
            json.dump({"command": list(command), "environment": _settable(environment)}, words)
        return pid

    def _fork(self, descriptors: Sequence[int]) -> int:
        with _adopting():
            socket.send_fds(self._socket, [b"\0"], descriptors)
            answer = self._socket.recv(PID.size, socket.MSG_WAITALL)
        if len(answer) < PID.size:
            raise ConnectionResetError("it has ended")
        (pid,) = PID.unpack(answer)
        return int(pid)

    def give_up(self) -> None:
        """Wait for it no more: services are programs from now on. Safe from any thread."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it; services that it began go on."""
        if self._process is None:
            return
        self.memory = of_fork_server(self._process.pid)
        self._socket.close()
        # Popen.kill would reap one that has ended, and its account.
        os.kill(self._process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._process = None
        self.cpu_seconds = usage.ru_utime + usage.ru_stime


def _settable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return it without a name that is empty: a program can be given it, and no process can set it."""
    return {name: value for name, value in environment.items() if name}


@contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of whom a descendant leaves behind. Raises OSError where the kernel does not have it."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no parent can be made of this process")
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
