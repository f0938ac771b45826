"""The stream on which a run is watched: when its reader goes away, the run goes on unwatched.

A terminal is closed, or the command behind a pipe ends; neither is a reason to lose a run.
"""

import errno
import os
from collections.abc import Callable
from typing import Any, Final, TextIO, TypeVar

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
