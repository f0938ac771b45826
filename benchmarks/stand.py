"""Options and tables of benchmarks, child processes, and Redis with a broker as real services."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table as RichTable

from penstock.launch.run.supervisor import Exit, ServiceProcess, ServiceSpec, penstock
from penstock.protocol.limits import KIB
from penstock.runtime.health import Endpoint, read_endpoint
from penstock.runtime.lifecycle import ENVIRONMENT

PENSTOCK: Final = str(Path(sys.executable).with_name("penstock"))
PREFIX: Final = "penstock-bench-"
START_TIMEOUT_S: Final = 60.0
LIMIT_S: Final = 1800.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")

Cell = str | int | float | None
Ask = Callable[..., dict[str, float]]
"""Measures once; its arguments are the words of a client's command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line. repeat: runs of each measurement, whose median is shown."""

    repeat: int = 1
    actors: int = 200
    rate: float = 5.0
    seconds: float = 40.0
    device: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of results: one cell for each column of a row; numbers stay numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def show(self, console: Console) -> None:
        table = RichTable(*self.columns, title=self.title, title_justify="left", caption=self.note or None)
        for row in self.rows:
            table.add_row(*map(_text, row))
        console.print(table)

    def to_json(self) -> Mapping[str, Any]:
        return asdict(self)


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of those that are not None."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


# ---- processes


@contextmanager
def child(*command: str, pipes: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """Start a process, killed when the caller fails; like those of a run it keeps memory that it has freed.

    pipes: input and output are the caller's.
    """
    pipe, environment = subprocess.PIPE if pipes else None, os.environ | ENVIRONMENT
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


@contextmanager
def client(*command: str) -> Iterator[Ask]:
    """Start a client that reads a line of words for each measurement and answers with a line of JSON."""
    with child(*command, pipes=True) as process:
        write, read = process.stdin, process.stdout
        assert write is not None
        assert read is not None

        def ask(*words: object) -> dict[str, float]:
            write.write(" ".join(map(str, words)) + "\n")
            write.flush()
            if not (answer := read.readline()):
                raise RuntimeError(f"the client failed: {words}")
            figures: dict[str, float] = json.loads(answer)
            return figures

        yield ask
        write.close()


@contextmanager
def listening(*command: str) -> Iterator[tuple[str, int]]:
    """Start a server, to which a free port of this machine is told last; yield its address and its pid."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    until_s = time.monotonic() + 2 * START_TIMEOUT_S
    with subprocess.Popen([*command, str(port)]) as process:
        try:
            while not _is_open(port):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"{command} does not listen (exit code {process.poll()})")
                time.sleep(0.1)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.kill()


def _is_open(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def shell(command: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """Return the output of a command; all its processes end with this one.

    Raises RuntimeError with the last line of its error output where it fails, or takes longer than the limit.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[1]}: not done within {limit_s:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no error output"])[-1]
            raise RuntimeError(f"{command[1]}: exit {process.returncode}: {last}")
    return output


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, also of one that has ended and was not waited for."""
    # The second field is the program's name, which may hold spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_bytes(pid: int) -> int:
    """Return the most bytes that a process has had resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"/proc/{pid}/status has no VmHWM")


# ---- services


@dataclass(frozen=True, slots=True)
class Services:
    """Running services. broker: its address, "" without one. folder: temporary, with their endpoint files."""

    redis_url: str
    broker: str
    folder: Path

    def endpoint(self, role: str) -> Endpoint:
        """Return pid and ports of `redis` or `broker`."""
        endpoint = read_endpoint(self.folder / "endpoints" / f"{role}.json")
        assert endpoint is not None
        return endpoint

    @property
    def redis_pid(self) -> int:
        """Return the server's own pid; the service that guards it has another."""
        pid = self.endpoint("redis").server_pid
        assert pid is not None
        return pid


@contextmanager
def services(*, durability: str, broker: bool = True) -> Iterator[Services]:
    """Start Redis with a durability (memory, fsync_1s, fsync), and a broker; both end at the end."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        root = Path(name)
        url, address = f"unix://{root}/redis.sock", f"unix:{root}/broker.sock"
        set_ = ("--set", f"broker.durability={durability}", "--set", "broker.max_memory_bytes=4294967296")
        commands = {"redis": ("--socket", f"{root}/redis.sock", "--dir", f"{root}/redis", *set_)}
        if broker:
            commands["broker"] = ("--redis", url, "--listen", address, *set_)
        with processes(root, {role: penstock(role, *words) for role, words in commands.items()}):
            yield Services(url, address if broker else "", root)


@contextmanager
def processes(root: Path, commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, int]]:
    """Start processes one after another and yield their pids; each announces itself in `root`.

    Raises RuntimeError with the last line of its log where one does not come up.
    """
    lifeline, write_fd = os.pipe()
    started: list[ServiceProcess] = []
    try:
        for role, command in commands.items():
            started.append(_start(role, command, root, lifeline))
        yield {process.spec.name: process.pid for process in started}
    finally:
        os.close(write_fd)
        for process in reversed(started):
            process.kill()
        os.close(lifeline)


def _start(role: str, command: Sequence[str], root: Path, lifeline: int) -> ServiceProcess:
    ended: list[Exit] = []
    for name in ("logs", "endpoints"):
        (root / name).mkdir(exist_ok=True)
    process = ServiceProcess(
        ServiceSpec(name=role, role=role, command=tuple(command)),
        folder=root,
        lifeline_fd=lifeline,
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
