"""Services of the tests as processes that begin where the large libraries have been imported already.

A process of its own imports torch, Gymnasium and the like once and forks every service from there, so that a
learner starts in a fifth of the CPU time. gRPC and the project's own modules, which read the environment as
they are loaded, are imported by the service itself, as in any process.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.run import preload

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([preload.__name__])
PENSTOCK: Final = "import sys; from penstock.launch.cli.app import main; sys.exit(main())"
"""The program that the words of a command line follow."""
MODULE: Final = """
import runpy, sys
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""The program that runs the module named first, as `python -m` does."""


class ForkedProcess:
    """A running service, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, program: str, *words: str, output: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Run a program's text as `python -c` does, with `words` behind it in `sys.argv`.

        output: stdout and stderr are appended to this file. environment: all of its variables; those of this
        process unless given.
        """
        output.touch()
        given = dict(os.environ if environment is None else environment)
        self._process = _CONTEXT.Process(
            target=_begin, args=(program, words, str(output), str(Path.cwd()), given)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        _started.add(self)

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that killed it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; raises subprocess.TimeoutExpired while it still runs after `timeout` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_started: Final = weakref.WeakSet[ForkedProcess]()


@atexit.register
def _end_all() -> None:
    for process in tuple(_started):
        process.kill()


def _begin(
    program: str, words: tuple[str, ...], output: str, folder: str, environment: dict[str, str]
) -> None:
    """In the child, which has imported nothing of the project that reads its environment."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with Path(output).open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.argv = ["-c", *words]
    try:
        exec(program, {"__name__": "__main__"})  # noqa: S102 - the text is that of a test
    finally:
        atexit._run_exitfuncs()
