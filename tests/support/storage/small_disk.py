"""Disks that a test can fill and empty under a running process.

A small tmpfs, or a limit on the size of files.

The tmpfs is the real thing and needs leave to mount; the limit (`prlimit`) needs none and gives the process
the same error at the same call, EFBIG instead of ENOSPC.
"""

import os
import resource
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

import pytest

TMPFS_BYTES: Final = 8 * 1024 * 1024
_BALLAST: Final = "ballast"
_PIECE_BYTES: Final = 64 * 1024
_NO_LIMIT: Final = resource.RLIM_INFINITY


class SmallDisk(ABC):
    """What a folder's files may still grow by."""

    @abstractmethod
    def fill(self, left: int) -> None:
        """Leave about `left` bytes."""

    @abstractmethod
    def free(self) -> None:
        """Make room again."""


class Tmpfs(SmallDisk):
    """A file system of TMPFS_BYTES on `folder`."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / _BALLAST
        self._folder = folder

    def fill(self, left: int) -> None:
        with (
            self._ballast.open("wb", buffering=0) as file,
            suppress(OSError),
        ):  # others may write there as well
            while (room := self._room() - left) > 0:
                file.write(bytes(min(room, _PIECE_BYTES)))

    def free(self) -> None:
        self._ballast.unlink()

    def _room(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize


class SizeLimit(SmallDisk):
    """No file of a process may grow larger than its largest one in `folder` is now and `left` more."""

    def __init__(self, folder: Path, pid: Callable[[], int | None]) -> None:
        self._folder, self._pid = folder, pid

    def fill(self, left: int) -> None:
        sizes = [path.stat().st_size for path in self._folder.rglob("*") if path.is_file()]
        self._limit(max(sizes, default=0) + left)

    def free(self) -> None:
        """Takes the limit away; a process that was killed took it along."""
        self._limit(_NO_LIMIT)

    def _limit(self, size: int) -> None:
        pid = self._pid()
        if pid is not None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, _NO_LIMIT))


@contextmanager
def small_disk(kind: str, folder: Path, pid: Callable[[], int | None]) -> Iterator[SmallDisk]:
    """A disk of that kind under `folder`, which exists.

    pid: whose files are limited, asked when they are; None while there is no process.
    """
    if kind == "limit":
        yield SizeLimit(folder, pid)
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield Tmpfs(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@cache
def can_mount() -> bool:
    if os.geteuid() != 0:
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


KINDS: Final = ("tmpfs", pytest.param("limit", marks=pytest.mark.slow)) if can_mount() else ("limit",)
"""Parameters of a test: the best disk that this user can have, then the other one."""
