"""Health of a process over HTTP: whether it is alive, ready and making progress.

`/healthz` fails when something with a watch has not progressed in time, or after a call of `fail`; `/readyz`
fails until `set_ready(True)` and whenever `/healthz` fails. The body gives the reason. The HTTP port carries
no run data and no secrets. Health is safe to use from any thread.
"""

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST

from penstock.rpc.address import AddressInUse
from penstock.runtime import metrics

# ---- The garbage collector at the start of a service, when nearly all new objects stay.

MANY_OBJECTS: Final = 20_000
"""Number of new objects after which the collector runs."""
_USUAL: Final = gc.get_threshold()


def collect_seldom() -> None:
    """Collect only after MANY_OBJECTS new objects, for code whose objects live long or form no cycles."""
    gc.set_threshold(MANY_OBJECTS, *_USUAL[1:])


def leave_out_what_stays() -> None:
    """Collect once, and exclude the remaining objects from later collections.

    A collection of all objects of a gateway's start delays every request by a tenth of a second.
    """
    gc.collect()
    gc.freeze()


# ---- Progress while environments are made, of which each may take as long as a step.

_made: ContextVar[Callable[[], None]] = ContextVar("made", default=lambda: None)


@contextmanager
def on_made(progress: Callable[[], None]) -> Iterator[None]:
    """Call `progress` for each environment that is made inside the block."""
    token = _made.set(progress)
    try:
        yield
    finally:
        _made.reset(token)


def note_made() -> None:
    """Note that one of several environments is made."""
    _made.get()()


ENDPOINT_VARIABLE: Final = "PENSTOCK_ENDPOINT_FILE"
READER_S: Final = 60.0
"""Seconds after which a reader of the metrics that has not returned is forgotten."""
SILENCE_S: Final = 10.0
"""Seconds after which an idle connection is closed, since each occupies a thread."""
_MAX_READERS: Final = 16
_POLL_S: Final = 0.05
_MAX_PID: Final = 2**31 - 1
_MAX_PORT: Final = 2**16 - 1


@dataclass(slots=True)
class _Watch:
    timeout_s: float
    last_s: float
    suspended: bool = False
    why: str = ""

    def is_over(self, now_s: float) -> bool:
        return not self.suspended and now_s - self.last_s > self.timeout_s

    def describe(self, now_s: float) -> str:
        text = f"no progress for {now_s - self.last_s:.0f} s (limit {self.timeout_s:g} s)"
        return f"{text}: {self.why}" if self.why else text


class Health:
    """The health of one process, as `/healthz` and `/readyz` answer it; safe to use from any thread."""

    def __init__(self, role: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.role = role
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: dict[str, _Watch] = {}
        self._failure: str | None = None
        self._not_ready: str | None = "starting"
        self._read_s: dict[str, float] = {}
        metrics.set_role(role)

    def set_ready(self, ready: bool, why: str = "") -> None:
        """Declare the process ready, which ends `collect_seldom`, or not ready with the reason `why`."""
        with self._lock:
            self._not_ready = None if ready else why or "not ready"
        # Ends `collect_seldom`: a cycle that holds much memory must be collected soon.
        if ready and gc.get_threshold()[0] == MANY_OBJECTS:
            gc.set_threshold(*_USUAL)

    def watch(self, name: str, timeout_s: float) -> None:
        """Expect `progress(name)` at least every `timeout_s` seconds from now on."""
        with self._lock:
            self._watches[name] = _Watch(timeout_s, self._clock())

    def progress(self, name: str) -> None:
        """Note progress of `name`; ends a suspension."""
        with self._lock:
            watch = self._watches[name]
            watch.last_s, watch.suspended = self._clock(), False

    def expect(self, name: str, why: str) -> None:
        """Expect progress of `name` from now on; `why` is reported where there is none."""
        with self._lock:
            watch = self._watches[name]
            if watch.suspended:
                watch.last_s, watch.suspended = self._clock(), False
            watch.why = why

    def has_stalled(self, name: str) -> bool:
        with self._lock:
            return self._watches[name].is_over(self._clock())

    def suspend(self, name: str) -> None:
        """Exempt `name`, which waits on purpose (paused, draining), until its next progress."""
        with self._lock:
            self._watches[name].suspended = True

    def fail(self, reason: str) -> None:
        """Let `/healthz` fail for the rest of the process's life."""
        with self._lock:
            self._failure = self._failure or reason

    def problem(self) -> str | None:
        with self._lock:
            if self._failure:
                return self._failure
            now = self._clock()
            for name, watch in self._watches.items():
                if watch.is_over(now):
                    return f"{name}: {watch.describe(now)}"
        return None

    @contextmanager
    def read_by(self, reader: str) -> Iterator[None]:
        """Record that `reader` reads the metrics inside the block."""
        began = self._clock()
        yield
        with self._lock:
            self._read_s = {who: at_s for who, at_s in self._read_s.items() if began - at_s < READER_S}
            if reader and (reader in self._read_s or len(self._read_s) < _MAX_READERS):
                self._read_s[reader] = began

    def await_readers(self, within_s: float, over: threading.Event) -> None:
        """Wait until every recent reader of the metrics has read them again.

        The wait ends after `within_s` seconds, or when `over` is set. A process that ends by itself calls it,
        or its last counts would be lost before the next scrape.
        """
        began = self._clock()
        with self._lock:
            awaited = {who for who, at_s in self._read_s.items() if began - at_s < READER_S}
        while awaited and self._clock() - began < within_s and not over.wait(_POLL_S):
            with self._lock:
                awaited -= {who for who in awaited if self._read_s.get(who, 0.0) > began}

    def unready(self) -> str | None:
        problem = self.problem()
        with self._lock:
            return problem or self._not_ready


def serve_http(health: Health, host: str, port: int) -> tuple[ThreadingHTTPServer, int]:
    """Serve /metrics, /healthz and /readyz from a daemon thread; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        """Answers GET requests only; ignores a reader that disconnects."""

        timeout = SILENCE_S

        def handle(self) -> None:
            with suppress(ConnectionError):
                super().handle()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                with health.read_by(self.headers.get("User-Agent", "")):
                    self._answer(HTTPStatus.OK, metrics.exposition(health.role), CONTENT_TYPE_LATEST)
            elif path in ("/healthz", "/readyz"):
                reason = health.problem() if path == "/healthz" else health.unready()
                status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
                self._answer(status, f"{reason or 'ok'}\n".encode(), "text/plain; charset=utf-8")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"/metrics /healthz /readyz\n", "text/plain")

        def log_message(self, *_args: object) -> None:
            """Do not log scrapes."""

        def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        text = f"metrics.host={host} metrics.port={port}: {error.strerror}; choose another port, or 0"
        raise AddressInUse(text) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server, int(server.server_address[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Addresses of a process, written as one line of JSON. server_pid: of its Redis server, if it has one.

    Raises TypeError or ValueError for values that no process has.
    """

    role: str
    pid: int
    metrics_port: int
    address: str = ""
    server_pid: int | None = None

    def __post_init__(self) -> None:
        for name in ("role", "address"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name}={value!r}: must be a text")
        for name, most in (("pid", _MAX_PID), ("metrics_port", _MAX_PORT), ("server_pid", _MAX_PID)):
            value = getattr(self, name)
            if value is None and name == "server_pid":
                continue
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"{name}={value!r}: must be a whole number from 0 to {most}")


def announce(
    role: str, *, metrics_port: int, address: str = "", server_pid: int | None = None, rank: int = 0
) -> Endpoint:
    """Write this process's endpoint to the launcher's file for it; a rank beyond 0 has its own file."""
    endpoint = Endpoint(
        role=role, pid=os.getpid(), metrics_port=metrics_port, address=address, server_pid=server_pid
    )
    name = os.environ.get(ENDPOINT_VARIABLE)
    if name:
        file = Path(name)
        file = file.with_stem(f"{file.stem}-{rank}") if rank else file
        temporary = Path(f"{file}.tmp")
        temporary.write_text(json.dumps(asdict(endpoint)) + "\n")
        temporary.replace(file)
    return endpoint


def announce_end() -> None:
    """Announce to the launcher, if there is one, that this process ends on request or after its work.

    Exit status 0 alone does not show it: an environment may call `exit` itself.
    """
    name = os.environ.get(ENDPOINT_VARIABLE)
    if name:
        ended_file(Path(name)).touch()


def ended_file(endpoint_file: Path) -> Path:
    """Return the file that announces the end of the process with this endpoint file."""
    return endpoint_file.with_suffix(".ended")


def read_endpoint(path: Path) -> Endpoint | None:
    try:
        return Endpoint(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
