"""The example client in JavaScript, installed once and run as a process.

Needs `node` (18.3 or newer) and `npm` on PATH; the packages of `examples/node/package-lock.json` come from
npm's registry or its cache.
"""

import fcntl
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

FOLDER: Final = Path(__file__).resolve().parents[3] / "examples" / "node"
INSTALL_S: Final = 240
PLAY_S: Final = 240


def node() -> str:
    """Path of `node`; skips the test where it or npm is absent."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not on PATH (Debian: apt-get install nodejs npm)")
    return found


def install(folder: Path = FOLDER) -> None:
    """The packages of an example's lock file, unless they are there; one process at a time."""
    node()
    lock, installed = folder / "package-lock.json", folder / "node_modules" / ".package-lock.json"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
            return
        done = subprocess.run(
            ["npm", "ci", "--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=folder, capture_output=True, text=True, check=False, timeout=INSTALL_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def play(address: str, episodes: int, *, learn: bool = False, seed: int = 1) -> dict[str, Any]:
    """What `play.js` prints: `episodes` and `mean_return`."""
    install()
    command = [node(), "play.js", address, "--episodes", str(episodes), "--seed", str(seed)]
    done = subprocess.run(
        [*command, *(["--learn"] if learn else [])],
        cwd=FOLDER, capture_output=True, text=True, check=False, timeout=PLAY_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
