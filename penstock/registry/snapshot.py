"""A registry's file that is only read: nothing beside it is made, and its tables stay as they are.

A write-ahead log needs two files beside the database, so that even reading makes some. A database that no
process has open has none and is read as it lies there; one that is open is read through those that are there.
"""

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4


def is_writable(file: Path) -> bool:
    """Return whether the file can be written, and others beside it."""
    return os.access(file.parent, os.W_OK) and os.access(file, os.W_OK)


def reading_uri(file: Path) -> str:
    """SQLite's URI of a file that is only read."""
    beside = (file.with_name(f"{file.name}{suffix}") for suffix in ("-wal", "-shm"))
    is_open = all(one.exists() for one in beside)
    return f"file:{quote(str(file.absolute()))}?mode=ro{'' if is_open else '&immutable=1'}"


def copied(file: Path) -> tuple[str, sqlite3.Connection]:
    """A copy in memory: its URI, and the connection that keeps it. Raises sqlite3.Error."""
    uri = f"file:registry-{uuid4().hex}?mode=memory&cache=shared"
    kept = sqlite3.connect(uri, uri=True, check_same_thread=False)
    source = sqlite3.connect(reading_uri(file), uri=True)
    try:
        source.backup(kept)
    finally:
        source.close()
    return uri, kept
