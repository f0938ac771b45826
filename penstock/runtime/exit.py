"""Exit codes of every process, and the error that ends one with a cause.

0 done; 1 failed, cause on the last stderr line; 2 bad usage or configuration; 130 interrupted.
"""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


class Fatal(Exception):
    """Ends the process with exit 1; its text is the last line on stderr."""
