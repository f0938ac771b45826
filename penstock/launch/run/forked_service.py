"""`python -m penstock.launch.run.forked_service FD`: the fork server of a launcher.

Imports what services import, then forks once for each message on the socket FD: a byte, with the reading end
of a pipe, the service's log and its lifeline. The answer is the pid. A copy reads from the pipe what it is,
and is nothing where the pipe closes before that. The server ends when the socket does.

Only a process of one thread may be copied: where an import has started another, the server ends, and the
launcher starts programs.
"""

import gc
import json
import os
import socket
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from setproctitle import setproctitle, setthreadtitle

from penstock.launch.run.fork_server import PENSTOCK, PID
from penstock.runtime.health import collect_seldom
from penstock.runtime.lifecycle import LIFELINE_VARIABLE

_MODULES: Final = (
    "penstock.broker.service.process",
    "penstock.launch.run.redis_service",
    "penstock.actor.process",
)


def main() -> None:
    """Serve; in a copy, be the service."""
    setproctitle("penstock fork server")  # the first call finds the place, from what the environment is now
    collect_seldom()
    # gRPC reads it as it is loaded (`penstock.runtime.foreground`).
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app = import_module("penstock.launch.cli.app")
    for module in _MODULES:
        import_module(module)
    gc.freeze()
    is_alone = len(list(Path("/proc/self/task").iterdir())) == 1
    told = _serve(socket.socket(fileno=int(sys.argv[1]))) if is_alone else None
    if told is not None:
        _become(**told)
        app.main()


def _serve(launcher: socket.socket) -> dict[str, Any] | None:
    """Fork for each message. Return what a copy is told, None in the server or if it is told nothing."""
    with launcher:
        while True:
            message, descriptors, _, _ = socket.recv_fds(launcher, 1, 3)
            if not message:
                return None
            told, log, lifeline = descriptors
            pid = _fork_orphan()
            if pid == 0:
                break
            launcher.sendall(PID.pack(pid))
            for descriptor in descriptors:
                os.close(descriptor)
    with os.fdopen(told) as words:
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
    """Have what a program has that the launcher starts."""
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[LIFELINE_VARIABLE] = str(lifeline)
    import numpy as np

    # Copies would draw the same numbers. Python's own generator is seeded anew by a fork, numpy's is not.
    np.random.seed()  # noqa: NPY002 - environments draw from this one
    _have_main(command)
    setproctitle(" ".join(command))
    setthreadtitle(f"penstock {command[len(PENSTOCK)]}")


def _have_main(command: list[str]) -> None:
    """Be the program of the command line: an environment's processes and a learner's ranks begin with it."""
    program = sys.modules["__main__"]
    program.__spec__ = find_spec("penstock.launch.cli.__main__")
    program.__package__ = "penstock.launch.cli"
    program.__file__ = str(Path(sys.modules["penstock.launch.cli"].__path__[0]) / "__main__.py")
    sys.argv = [program.__file__, *command[len(PENSTOCK) :]]
    sys.orig_argv = command


if __name__ == "__main__":
    main()
