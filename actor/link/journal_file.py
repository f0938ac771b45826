"""A file of JSON lines that a crash may tear at its end: what records for the audit are written to.

A line survives `kill -9` of its process, not loss of power.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.config.settings import ConfigurationError
from penstock.runtime.exit import Fatal


class JournalFile:
    """Used by one thread."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError when the file cannot be opened."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._end_torn_line()
        except OSError as error:
            raise ConfigurationError(f"actor.ack_journal={path.parent}: {error.strerror}") from error

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each, in one write; raises Fatal when the disk does not take it."""
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        if not text:
            return
        try:
            written = self._file.write(text)
        except OSError as error:
            raise Fatal(f"actor.ack_journal: {self.path}: {error.strerror}") from error
        if written != len(text):
            raise Fatal(f"actor.ack_journal: {self.path}: the disk took {written} of {len(text)} bytes")

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _end_torn_line(self) -> None:
        """A crash may have cut the last line: the next one starts behind it."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")
