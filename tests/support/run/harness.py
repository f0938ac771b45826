"""The one place where tests start Redis, the services and whole runs.

`redis`, `broker`, `server`, `reward_server`, `GatewayProcess` and `run` are context managers: what they start
serves when the block begins and is gone when it ends. What `service` and `launch` start is not waited for.
Actors and learners in threads of the test are `ActorThread` (actor_run) and `LearnerThread` (learner_run).
"""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

import pytest

from penstock.broker.log.learner_log import LearnerLog
from penstock.launch.run.supervisor import penstock
from penstock.runtime.health import ENDPOINT_VARIABLE, Endpoint, read_endpoint
from tests.support.run import store_run
from tests.support.run.forked_process import PENSTOCK, ForkedProcess
from tests.support.run.small_run import CHARGE, STEPS, specification
from tests.support.storage.redis_server import Binary, RedisServer, find_binaries

BROKER: Final = """
import json, sys
from penstock.broker.service.process import main
from penstock.runtime.lifecycle import run_service
from penstock.config.settings import load
redis_url, listen, settings = sys.argv[1:]
sys.exit(run_service(
    lambda lifecycle: main(lifecycle, load([json.loads(settings)]), redis_url=redis_url, listen=listen),
    "broker",
))
"""
LONG: Final = ("--actors", "2", "--total-steps", "100000000", "--set", "learner.stop_at_target=false")
"""A run that ends when it is asked to."""
OFTEN: Final = ("--set", "learner.checkpoint_interval_s=1")
ANSWER_S: Final = 20.0
PATIENCE_S = 240.0
"""For a command, and for each step forward of a run."""
GONE_S: Final = 20.0
SERVER_READY_S: Final = 180.0


def eventually(condition: Callable[[], Any], what: str = "the condition", within_s: float = ANSWER_S) -> None:
    """Return when `condition()` is true; AssertionError after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {within_s} s"
        time.sleep(0.02)


def command(*words: str, timeout: float = PATIENCE_S, **options: Any) -> "subprocess.CompletedProcess[str]":
    """`penstock WORDS`, to its end; options of `subprocess.run`."""
    given = {"capture_output": True, "text": True} | options
    return subprocess.run(penstock(*words), check=False, timeout=timeout, **given)


@contextmanager
def redis(folder: Path | None = None, *options: str, binary: Binary | None = None) -> Iterator[RedisServer]:
    """A server with an append-only file; the test may kill it and start it again.

    folder: has a path short enough for a socket; one of its own unless given.
    """
    own = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp")) if folder is None else None
    server = RedisServer(binary or find_binaries()[0], folder or own or Path(), *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class BrokerProcess:
    """A service that was started, of any role; `log` holds its stderr."""

    process: "ForkedProcess | subprocess.Popen[bytes]"
    endpoint_file: Path
    log: Path

    @property
    def endpoint(self) -> Endpoint:
        endpoint = read_endpoint(self.endpoint_file)
        assert endpoint is not None, self.log.read_text()
        return endpoint

    @property
    def address(self) -> str:
        return self.endpoint.address

    def get(self, path: str) -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{self.endpoint.metrics_port}{path}"
            with urllib.request.urlopen(url, timeout=5) as reply:
                return int(reply.status), reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; `name` may go on with some of them."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))
        )

    def refused(self, reason: str) -> float:
        rows = self.get("/metrics")[1].splitlines()
        found = [row for row in rows if row.startswith(f'penstock_refusals_total{{reason="{reason}"}}')]
        return sum(float(row.rpartition(" ")[2]) for row in found)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.endpoint_file.exists() and self.get("/readyz")[0] == 200

    def wait(self) -> tuple[int, str]:
        code = self.process.wait(ANSWER_S)
        return code, self.log.read_text().strip().rpartition("\n")[2]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)


def launch(
    redis_url: str, folder: Path, *, listen: str = "127.0.0.1:0", settings: dict[str, Any] | None = None
) -> BrokerProcess:
    folder.mkdir(parents=True, exist_ok=True)
    endpoint_file, log = folder / "broker.json", folder / "penstock.broker.log"
    log.unlink(missing_ok=True)
    words = (redis_url, listen, json.dumps(settings or {}))
    environment = {**os.environ, ENDPOINT_VARIABLE: str(endpoint_file)}
    process = ForkedProcess(BROKER, *words, output=log, environment=environment)
    return BrokerProcess(process=process, endpoint_file=endpoint_file, log=log)


@contextmanager
def broker(
    redis_url: str, folder: Path, *, listen: str = "127.0.0.1:0", settings: dict[str, Any] | None = None
) -> Iterator[BrokerProcess]:
    started = launch(redis_url, folder, listen=listen, settings=settings)
    with _ended(started, "readiness of the broker", 60.0):
        yield started


@contextmanager
def service(folder: Path, *words: str, name: str = "service", **environment: str) -> Iterator[BrokerProcess]:
    folder.mkdir(parents=True, exist_ok=True)
    endpoint_file, log = folder / f"{name}.json", folder / f"{name}.log"
    given = {**os.environ, ENDPOINT_VARIABLE: str(endpoint_file), "OMP_NUM_THREADS": "1", **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(penstock(*words), stdout=out, stderr=out, env=given)
    started = BrokerProcess(process=process, endpoint_file=endpoint_file, log=log)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def server(
    folder: Path,
    run_dir: Path | None = None,
    name: str = "server",
    *words: str,
    broker: str = "",
    **section: Any,
) -> Iterator[BrokerProcess]:
    """`penstock serve` over a run's folder, or for the run behind the broker at an address.

    section: settings of `serving`, or `section.key`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    endpoint_file, log = folder / f"{name}.json", folder / f"{name}.log"
    named = {key if "." in key else f"serving.{key}": value for key, value in section.items()}
    given = {"registry.refresh_s": 0.05, **named}
    settings = [f"--set={key}={json.dumps(value)}" for key, value in given.items()]
    place = (f"--run={run_dir}",) if run_dir is not None else (f"--broker={broker}", "--actor-id=server-0")
    environment = {**os.environ, ENDPOINT_VARIABLE: str(endpoint_file), "OMP_NUM_THREADS": "1"}
    log.unlink(missing_ok=True)
    all_words = ("serve", "--listen=127.0.0.1:0", *settings, *place, *words)
    process = ForkedProcess(PENSTOCK, *all_words, output=log, environment=environment)
    started = BrokerProcess(process=process, endpoint_file=endpoint_file, log=log)
    with _ended(started, "readiness of the policy server", SERVER_READY_S):
        yield started


@contextmanager
def reward_server(
    model: Path, folder: Path, listen: str, assignments: Sequence[str] = ()
) -> Iterator[BrokerProcess]:
    folder.mkdir()
    endpoints, log = folder / "reward.json", folder / "reward.log"
    more = [word for text in assignments for word in ("--set", text)]
    words = ("rlhf", "reward", "serve", str(model), "--listen", listen, "--endpoints", str(endpoints), *more)
    started = BrokerProcess(
        process=ForkedProcess(PENSTOCK, *words, output=log), endpoint_file=endpoints, log=log
    )
    with _ended(started, "readiness of the reward service", SERVER_READY_S):
        yield started


@contextmanager
def reward_endpoint(answer: Callable[[Any, str | None], tuple[int, bytes]]) -> Iterator[str]:
    """The URL of rewards over HTTP. answer: status and body for what is asked with which authorization."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, body = answer(asked, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Nothing: its lines are not those of the run."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}/rewards"
        finally:
            server.shutdown()


class GatewayProcess:
    """`penstock gateway` in a folder, on a free port. Entering waits until it serves; leaving ends it."""

    _numbers = itertools.count(1)

    def __init__(self, folder: Path, *options: str) -> None:
        name = f"gateway-{next(self._numbers)}"
        self.log, self._endpoint_file = folder / f"{name}.log", folder / f"{name}.json"
        words = ("gateway", "--listen", "127.0.0.1:0", "--endpoints", str(self._endpoint_file), *options)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                penstock(*words), cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def __enter__(self) -> Self:
        eventually(self._is_announced, self.log.name, PATIENCE_S)
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.end()

    @property
    def endpoint(self) -> Endpoint:
        endpoint = read_endpoint(self._endpoint_file)
        assert endpoint is not None, self.log.read_text()
        return endpoint

    @property
    def url(self) -> str:
        return f"http://{self.endpoint.address}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.endpoint.metrics_port}/metrics"

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def _is_announced(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return read_endpoint(self._endpoint_file) is not None


def reward_secured(certificates: Path, run: str) -> list[str]:
    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_authority": "authority.pem"}
    said = [f"security.{key}={json.dumps(str(certificates / name))}" for key, name in files.items()]
    return [f"run={run}", *said]


@contextmanager
def _ended(started: BrokerProcess, what: str, within_s: float) -> Iterator[None]:
    try:
        eventually(started.is_ready, what, within_s)
        yield
    finally:
        started.end()


def open_run(
    redis_url: str,
    *,
    weights: bytes = b"weights-1",
    wait_s: float = ANSWER_S,
    unroll_length: int = STEPS,
    session_timeout_ms: int = 30_000,
    **pacing: Any,
) -> LearnerLog:
    """A learner that has taken the lease, opened a run with much room and published once."""
    run = specification(session_timeout_ms=session_timeout_ms, unroll_length=unroll_length)
    room: dict[str, Any] = {
        "budget": 64 * CHARGE,
        "max_log_bytes": 2**28,
        "max_log_entries": 10_000,
        **pacing,
    }
    given: dict[str, Any] = {
        "weights": weights,
        "wait_s": wait_s,
        "run": run,
        "session_timeout_ms": session_timeout_ms,
    }
    return store_run.open_run(redis_url, **given, **room)


class Training:
    """A running `penstock train`."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            penstock("train", "--run-dir", str(run_dir), *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.began_steps = self.steps()

    def steps(self) -> int:
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        whole = [line for line in lines if line.endswith("\n")]
        return int(json.loads(whole[-1])["env_steps"]) if whole else 0

    def until_steps(self, steps: int) -> None:
        self.until(lambda: self.steps() >= self.began_steps + steps)

    def until(self, condition: Callable[[], bool]) -> None:
        steps, deadline = -1, 0.0
        pause = threading.Event()
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode}: {self.process.communicate()}")
            if self.steps() > steps:
                steps, deadline = self.steps(), time.monotonic() + PATIENCE_S
            assert time.monotonic() < deadline, f"no step within {PATIENCE_S:.0f} s after {steps}"
            pause.wait(0.05)

    def endpoints(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads((self.run_dir / "endpoints.json").read_text()))

    def pids(self) -> dict[str, int]:
        """Every process of the run by name; Redis by its server's own pid."""
        return _pids(self.endpoints())

    def announced(self) -> dict[str, int]:
        """The same of those that have said so, also before the launcher has heard of them."""
        files = (self.run_dir / "endpoints").glob("*.json")
        return _pids({file.stem: json.loads(file.read_text()) for file in files})

    def ends_within(self, seconds: float) -> bool:
        try:
            self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, within_s: float = PATIENCE_S) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, err

    def completed(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Its summary, when it has ended well; its books balance."""
        code, _, errors = self.end(within_s)
        assert code == 0, errors
        summary = self.summary()
        assert summary["ledger"]["balanced"], summary["ledger"]
        return summary

    def audited(self) -> dict[str, Any]:
        """What `penstock audit` reports of a run that has ended; nothing is wrong."""
        done = command("audit", str(self.run_dir), "--json")
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        return dict(json.loads(done.stdout))

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))


@contextmanager
def run(run_dir: Path, *arguments: str) -> Iterator[Training]:
    """One run; nothing of it is left afterwards."""
    with trainings(run_dir) as start:
        yield start(*arguments)


@contextmanager
def trainings(run_dir: Path) -> Iterator[Callable[..., Training]]:
    """Starts trainings in one run folder, one after the other; nothing of them is left afterwards."""

    def start(*arguments: str) -> Training:
        training = Training(run_dir, *arguments)
        stack.callback(_clear, training)
        return training

    with ExitStack() as stack:
        yield start


def _clear(training: Training) -> None:
    training.process.kill()
    training.process.communicate()
    wait_until_gone(training)


def wait_until_gone(training: Training) -> float:
    """Wait until no process of the run is left; seconds that took."""
    began = time.monotonic()
    pause = threading.Event()
    left = set(training.announced().values())
    while left := {pid for pid in left if is_alive(pid)}:
        assert time.monotonic() - began < GONE_S, left
        pause.wait(0.05)
    return time.monotonic() - began


def _pids(endpoints: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {name: one["server_pid"] or one["pid"] for name, one in endpoints.items()}


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found
