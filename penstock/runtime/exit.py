"""Exit codes of every process, and the error that ends one with a cause.

0 done; 1 failed, cause on the last stderr line; 2 bad usage or configuration; 130 interrupted. A service
exits with 3 when the whole run has failed and starting it again would not help (the disk is full, nothing
arrives any more); `penstock train` then ends with 1.
"""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_RUN_FAILED: Final = 3
EXIT_INTERRUPTED: Final = 130


class Fatal(Exception):
    """Ends the process with exit 1; its text is the last line on stderr."""


class NoAnswer(Fatal):
    """Reports that who was asked gave no answer: what was asked for may have been done."""


class RunFailed(Fatal):
    """Ends the process with exit 3: the run cannot go on until something outside of it is changed."""
