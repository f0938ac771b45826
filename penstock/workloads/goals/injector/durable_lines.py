"""Files of JSON lines that survive a kill at any moment: what was added is there, whole, or not at all.

A line is on the disk before `add` returns. A kill in the middle of a line leaves a beginning without a
newline, which is cut off when the file is opened again.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.output_file import sync_folder

_CHUNK: Final = 65_536


class DurableLines:
    """One file, written by one process; `add_alone` is for one that several write."""

    def __init__(self, path: Path) -> None:
        """Open a file, or make it; raises ConfigurationError for a line that is no JSON object."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._cut_torn_line()
        sync_folder(path.parent)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; it is on the disk when this returns. Raises OSError, and then the file is unchanged."""
        size = os.fstat(self._file).st_size
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _cut_torn_line(self) -> None:
        size = end = os.fstat(self._file).st_size
        while end:
            begin = max(end - _CHUNK, 0)
            newline = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end != size:
            os.ftruncate(self._file, end)
            os.fsync(self._file)


def add_alone(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file that other processes add lines to as well; raises as `DurableLines` does."""
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = DurableLines(path)
        try:
            lines.add(line)
        finally:
            lines.close()


class FollowedLines:
    """Reads a file that others add lines to: each whole line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._number = 0

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and content of the lines that were not yielded yet; none where there is no file.

        Raises ConfigurationError that names the line which is no JSON object.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    self._number += 1
                    yield self._number, _parsed(self._path, self._number, line)
        except FileNotFoundError:
            return


def read_newest_lines(path: Path, most_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the newest whole lines of a file, oldest first; none where there is no file.

    most_bytes: how much of the end of the file is read. Raises ConfigurationError for a line that is no JSON
    object.
    """
    try:
        with path.open("rb") as file:
            begin = max(file.seek(0, os.SEEK_END) - most_bytes, 0)
            file.seek(max(begin - 1, 0))
            if begin and file.read(1) != b"\n":
                file.readline()
            for line in file:
                if line.endswith(b"\n"):
                    yield _parsed(path, None, line)
    except FileNotFoundError:
        return


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of every whole line, the first is 1; none where there is no file.

    Raises ConfigurationError that names the line which is no JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, _parsed(path, number, line)
    except FileNotFoundError:
        return


def _parsed(path: Path, number: int | None, line: bytes) -> dict[str, Any]:
    """number: of the line; None where it is not known."""
    which = "a line near the end" if number is None else f"line {number}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {which} is no JSON: {error}; move the file away") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: {which} is no JSON object; move the file away")
    return found
