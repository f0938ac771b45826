"""Memory: what the processes of a run need at most, and what this machine has left for them.

The kernel keeps the peak of each process (VmHWM). Pages of files, such as libraries, are in it for every
process that maps them and in memory once, and so are pages of a fork server that its copies have not written
to: the peaks of several processes are added, and these pages are counted once. psutil knows neither the peak
nor a container's limit, and takes two to three times as long to find the children of a process.
"""

import math
import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.config.run_folder import opener

_KIB: Final = 1024
_MIB: Final = 1024 * 1024
_CGROUP_LIMITS: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Of version 2 and of version 1, below /sys/fs/cgroup: what a container sees of its own."""
_TREES_INTERVAL_S: Final = 5.0
_MOST_WALKED: Final = 2 * 1024 * _MIB
"""Of larger processes the kernel takes long to say what they share, and a fork server's share is nothing."""
_DEVICE_INTERVAL_S: Final = 1.0
_DEVICE_QUERY: Final = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")
_DEVICE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of processes. peak: highest resident size, with shared (files) and inherited (fork server)."""

    peak: int = 0
    shared: int = 0
    inherited: int = 0

    def __or__(self, other: "Memory") -> "Memory":
        """Return the higher peaks of two measurements of the same processes."""
        return max(self, other, key=lambda one: one.peak)


def together(parts: Iterable[Memory]) -> Memory:
    """Return the memory of several processes: each with its own pages, those of files and forks once."""
    found = list(parts)
    shared = max((one.shared for one in found), default=0)
    inherited = max((one.inherited for one in found), default=0)
    own = sum(one.peak - one.shared - one.inherited for one in found)
    return Memory(peak=own + shared + inherited, shared=shared, inherited=inherited)


def of_process(pid: int) -> Memory:
    """Return the peak so far, inherited pages as its own; zeros for a process that has ended."""
    peak, shared = _fields(pid, "status", "VmHWM", "RssFile")
    return Memory(peak=peak, shared=min(peak, shared))


def of_fork_server(pid: int) -> Memory:
    """Return the peak so far of a fork server, whose pages its copies share."""
    peak, shared, own = _fields(pid, "status", "VmHWM", "RssFile", "RssAnon")
    return Memory(peak=peak, shared=shared, inherited=min(own, peak - shared))


def inherited_by(pid: int) -> int:
    """Return a lower bound of the bytes that a copy shares with its fork server; 0 for a large process."""
    resident, files = _fields(pid, "status", "VmRSS", "RssFile")
    if resident > _MOST_WALKED:
        return 0
    return max(0, sum(_fields(pid, "smaps_rollup", "Shared_Clean", "Shared_Dirty")) - files)


def _fields(pid: int, file: str, *names: str) -> list[int]:
    """Return sizes of a process in bytes; zeros for one that has ended or belongs to another user now."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        text = ""
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return [_kib(found.get(name, "0 kB")) for name in names]


class Trees:
    """Memory of processes with their living descendants, which are looked up at intervals."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self._inherited: dict[int, int] = {}
        self._at_s = -math.inf

    def look(self, roots: Iterable[int]) -> dict[int, Memory]:
        pids = list(roots)
        if time.monotonic() - self._at_s >= _TREES_INTERVAL_S:
            self._children, self._at_s = _children(), time.monotonic()
            self._inherited = {pid: inherited_by(pid) for pid in pids}
        return {pid: together(map(self._of, _tree(pid, self._children))) for pid in pids}

    def _of(self, pid: int) -> Memory:
        memory = of_process(pid)
        inherited = min(self._inherited.get(pid, 0), memory.peak - memory.shared)
        return replace(memory, inherited=inherited)


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * _KIB


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        # The name, in brackets, may hold anything.
        found[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    return found


def _tree(root: int, children: dict[int, list[int]]) -> list[int]:
    return [root, *(pid for child in children.get(root, ()) for pid in _tree(child, children))]


def available(root: Path = Path("/")) -> int:
    """Return the bytes free for new processes, in the machine and the container. root: of /proc and /sys."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    rooms = [_kib(meminfo["MemAvailable"])]
    for limit, usage in _CGROUP_LIMITS:
        folder = root / "sys/fs/cgroup"
        try:
            most, used = ((folder / name).read_text().strip() for name in (limit, usage))
        except (FileNotFoundError, NotADirectoryError):
            continue
        if most != "max":
            rooms.append(max(0, int(most) - int(used)))
    return min(rooms)


class DeviceMemory:
    """Watches this machine's GPUs with all that runs on them; no figure without nvidia-smi."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._before = device_memory()
        self._peak = self._before[0] if self._before else 0
        self._thread = threading.Thread(target=self._watch, name="device-memory", daemon=True)
        if self._before:
            self._thread.start()

    @property
    def peak(self) -> int | None:
        """Most bytes in use beyond those at the start; None without a GPU."""
        return self._peak - self._before[0] if self._before else None

    def close(self) -> None:
        self._ending.set()
        if self._before:
            self._thread.join(_DEVICE_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._ending.wait(_DEVICE_INTERVAL_S):
            seen = device_memory()
            self._peak = max(self._peak, seen[0] if seen else 0)


def device_memory() -> tuple[int, int] | None:
    """Return the used and the total bytes of all GPUs; None without a GPU."""
    if shutil.which(_DEVICE_QUERY[0]) is None:
        return None
    try:
        reply = subprocess.run(
            _DEVICE_QUERY, capture_output=True, text=True, check=True, timeout=_DEVICE_TIMEOUT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None  # the program is installed, and no device answers
    return parse_device_memory(reply.stdout)


def parse_device_memory(text: str) -> tuple[int, int] | None:
    """Return the sums in bytes of lines "used, total" in MiB; None where a device reports no number."""
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if not rows or any(not cell.strip().isdecimal() for row in rows for cell in row):
        return None
    used, whole = (sum(int(row[column]) for row in rows) * _MIB for column in (0, 1))
    return used, whole


_PROBE_BYTES: Final = 16 * 1024


def problem(folders: Iterable[Path]) -> str | None:
    """Return why a small file cannot be written in a folder; None where it can in all that exist."""
    for folder in folders:
        probe = folder / f".probe-{os.getpid()}"
        try:
            with open(probe, "wb", opener=opener) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"cannot write in {folder}: {error.strerror}"
        finally:
            with suppress(OSError):
                probe.unlink()
    return None


def explain(cause: str, run_dir: Path) -> str:
    """Return `cause`, after what may have hidden it: the run's folder is gone, or its disk is full."""
    if not run_dir.is_dir():
        return f"{run_dir}: the run's folder was removed while the run went on; start a new run ({cause})"
    found = problem((run_dir, run_dir / "checkpoints", run_dir / "redis", run_dir / "logs"))
    return cause if found is None else f"{found}; make room, then resume ({cause})"
