"""Files of JSON lines that survive a kill at any moment: what was added is there, whole, or not at all.

A line is on the disk before `add` returns. A kill in the middle of a line leaves a beginning without a
newline, which is cut off when the file is opened again.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError

_CHUNK: Final = 65_536


class DurableLines:
    """One file, written by one process."""

    def __init__(self, path: Path) -> None:
        """Open a file, or make it; raises ConfigurationError for a line that is no JSON object."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._cut_torn_line()
        _sync_folder(path.parent)

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


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: line {number} is no JSON: {error}; move the file away") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: line {number} is no JSON object; move the file away")
    return found


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
