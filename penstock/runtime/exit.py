"""Exit codes of every process, and the error that ends one with a cause.

0 done; 1 failed, cause on the last stderr line; 2 bad usage or configuration; 130 interrupted. A service
exits with 3 when the whole run has failed and a restart would not help (the disk is full, no experience
arrives); `penstock train` then ends with 1.
"""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_RUN_FAILED: Final = 3
EXIT_INTERRUPTED: Final = 130


class Fatal(Exception):
    """Ends the process with exit 1; its text is the last line on stderr."""


def one_line(text: object) -> str:
    """Return a text without its line breaks: who reads the last line reads the whole cause."""
    return " ".join(line.strip() for line in str(text).splitlines()).strip()


class NoAnswer(Fatal):
    """A service gave no answer: it may have done what it was called for."""


class RunFailed(Fatal):
    """Ends the process with exit 3: the run cannot continue before something outside of it changes."""
