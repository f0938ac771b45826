"""SQLite files that have their tables already: they are made once in a process of tests, then copied.

Opening such a file with `migrate=True` finds nothing to do, as in a program that is started again.
"""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from penstock.registry.registry import Registry

_SQLITE: Final = "sqlite:///"


def with_registry(url: str) -> str:
    """Return the URL, where an empty registry lies now; a database of another kind is left as it is."""
    return with_tables(url, _registry)


def with_tables(url: str, migrate: Callable[[str], None]) -> str:
    """Write what `migrate` makes at the URL of a new file to the file of this one; return the URL."""
    if url.startswith(_SQLITE):
        file = Path(url.removeprefix(_SQLITE))
        assert not file.exists()
        file.write_bytes(_made_by(migrate))
    return url


def _registry(url: str) -> None:
    Registry.open(url, migrate=True).close()


@cache
def _made_by(migrate: Callable[[str], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tables.sqlite"
        migrate(f"{_SQLITE}{file}")
        assert list(Path(folder).iterdir()) == [file], "the write-ahead log was not written back"
        return file.read_bytes()
