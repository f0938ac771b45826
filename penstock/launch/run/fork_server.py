"""The launcher's fork server: services begin as copies of a process that has imported them.

Each service would import settings, numpy, gRPC and the rest for itself: half a second of a core, five times,
before the first step of a run. The server (this module as a program) does so once, beside the launcher's own
start, and a service is a copy of it that goes on as its command line would. What was imported lies in memory
once, until somebody writes to it.

A copy is a child of the launcher, as a started program would be: the server forks twice, and the kernel gives
the orphan to the nearest ancestor that asks for such. The copy begins when the launcher tells it what to be,
so a launcher that gave up waiting can start the service in the other way and does not get it twice.
"""

import ctypes
import gc
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
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

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
                (sys.executable, "-P", "-m", "penstock.launch.run.fork_server", str(theirs.fileno())),
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
        """Start the service of a command line in a new process group; return its pid.

        None where it has to be started as a program: it is another command, or there is no server any more.
        environment: all that it has. log_fd: where it writes. lifeline_fd: see `penstock.runtime.lifecycle`.
        """
        if self._process is None or tuple(command[: len(PENSTOCK) + 1]) not in _FORKED:
            return None
        reading, writing = os.pipe()
        # A copy that was killed before it has read all breaks the pipe; its exit shows that.
        with suppress(BrokenPipeError), os.fdopen(writing, "w") as words:
            try:
                with os.fdopen(reading) as reader:
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
        """Stop waiting for it: services are started as programs from now on. Safe from any thread."""
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
    """Return an environment without an empty name, which a program may inherit and none can set."""
    return {name: value for name, value in environment.items() if name}


@contextmanager
def _adopting() -> Iterator[None]:
    """Adopt orphaned descendants inside the block; raises OSError where the kernel cannot do that."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphaned processes")
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# ---- The server: `python -m penstock.launch.run.fork_server FD`.
#
# It imports what services import, then forks once for each message on the socket FD: a byte, with the reading
# end of a pipe, the service's log and its lifeline. The answer is the pid. A copy reads from the pipe what it
# is, and is nothing where the pipe closes before that. The server ends when the socket does.
#
# Only a process of one thread may be copied: where an import has started another, the server ends, and the
# launcher starts programs.

_MODULES: Final = (
    "penstock.broker.service.process",
    "penstock.launch.run.redis_service",
    "penstock.actor.process",
)


def main() -> None:
    """Serve; in a copy, be the service."""
    # Not with the module: the launcher imports it before all else, and starts the server at once.
    from setproctitle import setproctitle

    from penstock.runtime.health import collect_seldom

    setproctitle("penstock fork server")  # the first call finds the place, from what the environment is now
    collect_seldom()
    # gRPC reads it as it is loaded (`penstock.runtime.foreground`).
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app = import_module("penstock.launch.cli.app")
    for module in _MODULES:
        import_module(module)
    gc.freeze()
    is_alone = len(list(Path("/proc/self/task").iterdir())) == 1
    service = _serve(socket.socket(fileno=int(sys.argv[1]))) if is_alone else None
    if service is not None:
        _become(**service)
        app.main()


def _serve(launcher: socket.socket) -> dict[str, Any] | None:
    """Fork for each message. Return the message in a copy; None in the server, or for an empty message."""
    with launcher:
        while True:
            message, descriptors, _, _ = socket.recv_fds(launcher, 1, 3)
            if not message:
                return None
            reading, log, lifeline = descriptors
            pid = _fork_orphan()
            if pid == 0:
                break
            launcher.sendall(PID.pack(pid))
            for descriptor in descriptors:
                os.close(descriptor)
    with os.fdopen(reading) as words:
        text = words.read()
    return {**json.loads(text), "log": log, "lifeline": lifeline} if text else None


def _fork_orphan() -> int:
    """Return 0 in a new process in a group of its own whose parent has ended, and its pid in this one."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.setpgid(pid, pid)
        os.write(writing, PID.pack(pid))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as born:
        (pid,) = PID.unpack(born.read())
    os.waitpid(between, 0)
    return int(pid)


def _become(command: list[str], environment: dict[str, str], log: int, lifeline: int) -> None:
    """Set up this copy as a program that the launcher starts: log, environment, and command line."""
    import numpy as np

    from penstock.runtime.lifecycle import LIFELINE_VARIABLE

    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[LIFELINE_VARIABLE] = str(lifeline)
    # Copies would draw the same numbers. Python's own generator is seeded anew by a fork, numpy's is not.
    np.random.seed()  # noqa: NPY002 - environments draw from this one
    # Be the program of the command line: an environment's processes and a learner's ranks begin with it.
    program = sys.modules["__main__"]
    program.__spec__ = find_spec("penstock.launch.cli.__main__")
    program.__package__ = "penstock.launch.cli"
    program.__file__ = str(Path(sys.modules["penstock.launch.cli"].__path__[0]) / "__main__.py")
    sys.argv = [program.__file__, *command[len(PENSTOCK) :]]
    sys.orig_argv = command
    # The extra `launch` brings it: an image of one service has this module and no launcher.
    from setproctitle import setproctitle, setthreadtitle

    setproctitle(" ".join(command))
    setthreadtitle(f"penstock {command[len(PENSTOCK)]}")


if __name__ == "__main__":
    main()
