"""A real PostgreSQL server for tests, on a unix socket."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from penstock.registry.registry import Registry

PATIENCE_S: Final = 60.0


_DIE_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "QUIT") if shutil.which("setpriv") else ()
"""A test process that is killed leaves no server behind."""
_OWNER: Final = "postgres"


@cache
def find_programs() -> Path | None:
    """The folder with `initdb` and `postgres`, None when there is none or no user that they would run as."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = (folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists())
    return next(found, None) if os.getuid() != 0 or _has_owner() else None


def _has_owner() -> bool:
    try:
        pwd.getpwnam(_OWNER)
    except KeyError:
        return False
    return True


class PostgresqlServer:
    """One server whose data and socket lie in `folder`, which has a path short enough for a socket."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._owner = _OWNER if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make the data, unless it was stopped before, and return when the server answers."""
        if self._owner is not None:
            shutil.chown(self._folder, self._owner)
        data = str(self._folder / "data")
        if not Path(data).exists():
            self._call("initdb", "--pgdata", data, "--auth", "trust", "--username", "penstock", "--no-sync")
        options = [f"-cunix_socket_directories={self._folder}", "-clisten_addresses=", "-cfsync=off"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*_DIE_WITH_PARENT, str(self._programs / "postgres"), "-D", data, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                user=self._owner,
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            assert self._process.poll() is None, (self._folder / "log").read_text()
            time.sleep(0.05)

    def new_database(self, name: str, *options: str) -> str:
        """URL of an empty database; options of `createdb`."""
        host = ("--host", str(self._folder), "--username", "penstock")
        self._call("createdb", *host, "--template", "template0", *options, name)
        return f"postgresql://penstock@/{name}?host={self._folder}"

    def stop(self) -> None:
        """At once, as if it had crashed; what it held is gone with its folder."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # at once, and it takes its children along
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        command = [str(self._programs / "pg_isready"), "--quiet", "--host", str(self._folder)]
        return subprocess.run(command, check=False, timeout=PATIENCE_S, cwd="/").returncode == 0

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            cwd="/",
            user=self._owner,
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def own_server() -> Iterator[PostgresqlServer]:
    """A server of its own, for a test that kills it or starts processes on it."""
    programs = find_programs()
    assert programs is not None
    place = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))
    server = PostgresqlServer(programs, place)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(place, ignore_errors=True)


DATABASES: Final = [
    "sqlite",
    pytest.param(
        "postgresql",
        marks=[
            pytest.mark.postgresql,
            pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found"),
        ],
    ),
]
"""Kinds of database, as parameters of a fixture."""


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
