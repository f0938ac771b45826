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
import errno
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

from penstock.launch.inspection.curve import parse_line
from penstock.launch.run.memory import NO_MEMORY, Memory, of_fork_server

PENSTOCK: Final = (sys.executable, "-P", "-m", "penstock.launch.cli")
"""The command line of `penstock` by this interpreter; -P: a folder here hides no package."""
_FORKED: Final = frozenset((*PENSTOCK, command) for command in ("redis", "broker", "learner", "actor"))
"""What the server can be. A policy server it cannot: that sets what gRPC reads as it is loaded."""
PID: Final = struct.Struct("=i")
_PATIENCE_S: Final = 30.0
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Files that a service inherits.

    log: where it writes. lifeline: see `penstock.runtime.lifecycle`.
    """

    log: int
    lifeline: int


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
        self.memory: Memory = NO_MEMORY

    @property
    def pid(self) -> int | None:
        """Return that of the server, None once it has ended."""
        return None if self._process is None else self._process.pid

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Descriptors
    ) -> int | None:
        """Begin what a command line says, in a process group of its own; return its pid.

        None where it has to be started as a program: it is another command, or there is no server any more.
        environment: all that it has.
        """
        if self._process is None or tuple(command[: len(PENSTOCK) + 1]) not in _FORKED:
            return None
        told, telling = os.pipe()
        # It was killed before it has read all: who waits for its end sees that.
        with suppress(BrokenPipeError), os.fdopen(telling, "w") as words:
            try:
                with os.fdopen(told) as reader:
                    pid = self._fork([reader.fileno(), descriptors.log, descriptors.lifeline])
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
        os.kill(
            self._process.pid, signal.SIGKILL
        )  # Popen.kill would reap one that has ended, and its account
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


# ---- How far a run is, read from the learner's `metrics.jsonl`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One line of `metrics.jsonl`, in what people watch. NaN: not known yet."""

    env_steps: int = 0
    updates: int = 0
    publications: int = 0
    steps_per_second: float = math.nan
    mean_return: float = math.nan
    staleness: float = math.nan
    outstanding: int = 0
    budget: int = 0
    log_bytes: int = 0
    training_seconds: float = math.nan


class MetricsTail:
    """Reads a growing `metrics.jsonl`; a missing file is an empty one.

    The learner writes lines from its first second on, so the first ones tell of no experience.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._first = None if self._offset else Progress()
        self._last: Progress | None = None

    def poll(self) -> Progress | None:
        """The newest progress, None until the first experience after this launcher's start."""
        rows = self._new_rows()
        if rows:
            self._first = self._first or to_progress(rows[0])
            self._last = to_progress(rows[-1])
        return self._last if self._has_begun() else None

    def _has_begun(self) -> bool:
        first, last = self._first, self._last
        if first is None or last is None:
            return False
        new = last.env_steps > first.env_steps or last.updates > first.updates
        return new or last.outstanding > 0

    def _new_rows(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A crash may have torn one; the learner begins another below it.
        return [row for row in map(parse_line, lines) if row is not None]


def to_progress(row: dict[str, Any]) -> Progress:
    """The fields of one line."""
    return Progress(
        env_steps=int(_number(row, "env_steps", 0)),
        updates=int(_number(row, "updates", 0)),
        publications=int(_number(row, "publications", 0)),
        steps_per_second=_number(row, "steps_per_second"),
        mean_return=_number(row, "mean_return"),
        staleness=_number(row, "staleness_p50"),
        outstanding=int(_number(row, "outstanding", 0)),
        budget=int(_number(row, "budget", 0)),
        log_bytes=int(_number(row, "log_bytes", 0)),
        training_seconds=_number(row, "training_seconds"),
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a `metrics.jsonl`, without what a learner that went back has made again."""
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for row in filter(
            None, (parse_line(line.removesuffix(b"\n")) for line in file if line.endswith(b"\n"))
        ):
            while rows and rows[-1].get("env_steps", 0) > row.get("env_steps", 0):
                rows.pop()
            rows.append(row)
    return rows


def _number(row: dict[str, Any], key: str, default: float = math.nan) -> float:
    value = row.get(key)
    return default if value is None else float(value)


# ---- The stream on which a run is watched: when its reader goes away, the run goes on unwatched.

T = TypeVar("T")
_READER_IS_GONE: Final = (errno.EPIPE, errno.EIO)


class WatchedStream:
    """A stream that leads nowhere once its reader is gone; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; returns its length."""
        return self._do(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        """Hand on what was written."""
        self._do(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except OSError as error:
            if error.errno not in _READER_IS_GONE:
                raise
            # What still waits to be written goes there too, also at the end of the process.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return otherwise
