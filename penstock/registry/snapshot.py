"""A registry's file that is only read: nothing beside it is made.

A write-ahead log needs two files beside the database, so that even reading makes some. A database that no
process has open has none and is read as it lies there; one that is open is read through those that are there.
"""

import os
from pathlib import Path
from urllib.parse import quote


def is_writable(file: Path) -> bool:
    """Return whether the file can be written, and others beside it."""
    return os.access(file.parent, os.W_OK) and os.access(file, os.W_OK)


def reading_uri(file: Path) -> str:
    """SQLite's URI of a file that is only read."""
    beside = (file.with_name(f"{file.name}{suffix}") for suffix in ("-wal", "-shm"))
    is_open = all(one.exists() for one in beside)
    return f"file:{quote(str(file.absolute()))}?mode=ro{'' if is_open else '&immutable=1'}"
