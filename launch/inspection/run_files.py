"""Opens files of a run's folder, which may come from anywhere: what is no regular file is not read.

A pipe in the place of one would be waited for without end, and a device never ends.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

MAX_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of a file that is read whole."""


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading; raises OSError, also for what is no regular file."""
    number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is no regular file", str(file))
    return os.fdopen(number, "rb")


def read_whole(file: Path) -> bytes:
    """Return what a file holds; raises OSError as `open_regular` does, and for more than `MAX_BYTES`."""
    with open_regular(file) as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"holds more than {MAX_BYTES} bytes", str(file))
    return content
