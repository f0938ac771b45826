"""A second process for measurements. Like every process of a run it keeps memory that it has freed."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.runtime.allocator import ENVIRONMENT


@contextmanager
def child(arguments: Sequence[str], *, pipes: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """Start a process of this interpreter; it is waited for at the end, and killed when the caller fails.

    pipes: its standard input and output are the caller's to write and read.
    """
    command, pipe = [sys.executable, *arguments], subprocess.PIPE if pipes else None
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
