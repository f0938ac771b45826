"""The executor `commands`: an argument list for each goal, started without a shell.

A command gets a folder, a clean environment, no input and a session of its own. At its limit, and when it has
ended, all that it has started in that session is killed. Of its output a bounded beginning is kept; the rest
is read and dropped, so that a talkative command neither blocks nor fills anything.
"""

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.executors.command_file import CommandFile
from penstock.workloads.goals.executors.executor import Outcome, Readings
from penstock.workloads.goals.executors.readings import read_host

_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_LAST_WORDS_S: Final = 1.0
"""How long output is waited for that a killed command still had in its pipe."""
_CHUNK: Final = 65_536


class NotAllowed(Exception):
    """A program that is not on the list; nothing was started."""


class Commands:
    """Carries out the goals of a file, which was checked when it was read."""

    def __init__(self, file: CommandFile, *, acts: bool) -> None:
        """acts: false for one that has goals and readings and refuses to begin an episode or a goal."""
        self._file, self._acts = file, acts
        self._commands: Mapping[str, Sequence[str]] = {one.name: one.command for one in file.goal}
        self.goals = tuple(self._commands)

    def reset(self, seed: int) -> None:
        """Begin an episode: the host is what it is; raises ConfigurationError where it may not act."""
        self._check_acts()

    def read(self) -> Readings:
        """Return readings of this host and of the folder's disk."""
        return read_host(self._file.folder)

    def idle(self) -> None:
        """Do nothing: no command is started."""

    def carry_out(self, goal: str) -> Outcome:
        """Start the goal's command and wait for its end, at most `limit_s`.

        Raises ConfigurationError where it may not act.
        """
        self._check_acts()
        begun = time.monotonic()
        try:
            process = self._start(self._commands[goal])
        except OSError as error:
            return Outcome(success=False, took_s=time.monotonic() - begun, error=f"not started: {error}")
        output = _Output(process, self._file.output_bytes)
        try:
            in_time = _ends_within(process, self._file.limit_s)
        finally:
            _kill_session(process)
        took_s = time.monotonic() - begun
        text = output.text()
        if not in_time:
            return Outcome(success=False, took_s=took_s, output=text, error=f"above {self._file.limit_s:g} s")
        code = process.returncode
        return Outcome(success=code == 0, took_s=took_s, output=text, error=f"exit {code}" if code else "")

    def _check_acts(self) -> None:
        if not self._acts:
            raise ConfigurationError(
                "environment.kwargs.executor='commands': only `penstock inject` carries out goals of a live "
                "host; start the run with --actors 0 --serve ADDRESS, or let its actors carry them out, too, "
                "with --set environment.kwargs.actors_act=true"
            )

    def _start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        if command[0] not in self._file.allow:
            raise NotAllowed(f"{command[0]!r} is not among {list(self._file.allow)}")
        return subprocess.Popen(
            list(command),
            executable=command[0],
            shell=False,
            cwd=self._file.folder,
            env={"PATH": _PATH, "HOME": str(self._file.folder), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def close(self) -> None:
        """Do nothing: no command runs between two goals."""


def _ends_within(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Wait for a command's end without collecting it, so that its number cannot be another's meanwhile."""
    handle = os.pidfd_open(process.pid)
    try:
        return bool(select.select([handle], [], [], limit_s)[0])
    finally:
        os.close(handle)


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill the group of a command that is not yet collected, and collect it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Output:
    """The beginning of what a process prints, read by a thread until the pipe is closed."""

    def __init__(self, process: "subprocess.Popen[bytes]", most_bytes: int) -> None:
        assert process.stdout is not None
        self._kept, self._most = bytearray(), most_bytes
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), _CHUNK):
                self._kept += chunk[: self._most - len(self._kept)]

    def text(self) -> str:
        self._thread.join(_LAST_WORDS_S)
        return bytes(self._kept).decode(errors="replace")
