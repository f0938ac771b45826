"""A Redis server that a test may kill, freeze and start again on the same files."""

import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.integration.broker_process import eventually

BINARY: Final = shutil.which("redis-server")


class RedisProcess:
    """One server on a unix socket in a short private folder, append-only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ps-"))
        self.socket = self.folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start on what the last one left; returns when it listens."""
        assert BINARY is not None
        self.socket.unlink(missing_ok=True)
        base = ("--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", "")
        self._process = subprocess.Popen(
            [BINARY, *base, "--appendonly", "yes", *options], stdout=subprocess.DEVNULL
        )
        eventually(self._listens, "the Redis server")

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def remove(self) -> None:
        """Kill it and forget its files."""
        self.kill()
        shutil.rmtree(self.folder)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True
