"""A real broker process in front of a real Redis, and the learner's side of the run it serves."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Pacing
from penstock.runtime.health import ENDPOINT_VARIABLE, Endpoint, read_endpoint
from tests.support.run.forked_process import ForkedProcess
from tests.support.run.small_run import CHARGE, RUN, STEPS, specification

PROGRAM: Final = """
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
PATIENCE_S: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class BrokerProcess:
    """A broker that was started; `log` holds its stderr."""

    process: "ForkedProcess | subprocess.Popen[bytes]"
    endpoint_file: Path
    log: Path

    @property
    def endpoint(self) -> Endpoint:
        """Where it serves."""
        endpoint = read_endpoint(self.endpoint_file)
        assert endpoint is not None, self.log.read_text()
        return endpoint

    @property
    def address(self) -> str:
        """Its gRPC address."""
        return self.endpoint.address

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page of its HTTP port."""
        try:
            url = f"http://127.0.0.1:{self.endpoint.metrics_port}{path}"
            with urllib.request.urlopen(url, timeout=5) as reply:
                return int(reply.status), reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def refused(self, reason: str) -> float:
        """How many calls it says that it refused for this reason."""
        rows = self.get("/metrics")[1].splitlines()
        found = [row for row in rows if row.startswith(f'penstock_refusals_total{{reason="{reason}"}}')]
        return sum(float(row.rpartition(" ")[2]) for row in found)

    def is_ready(self) -> bool:
        """Announced, and /readyz is green."""
        assert self.process.poll() is None, self.log.read_text()
        return self.endpoint_file.exists() and self.get("/readyz")[0] == 200

    def wait(self) -> tuple[int, str]:
        """Exit code and last line on stderr."""
        code = self.process.wait(PATIENCE_S)
        return code, self.log.read_text().strip().rpartition("\n")[2]

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


def launch(
    redis_url: str, folder: Path, *, listen: str = "127.0.0.1:0", settings: dict[str, Any] | None = None
) -> BrokerProcess:
    """Start a broker and return at once."""
    folder.mkdir(parents=True, exist_ok=True)
    endpoint_file, log = folder / "broker.json", folder / "penstock.broker.log"
    log.unlink(missing_ok=True)
    process = ForkedProcess(
        PROGRAM,
        redis_url,
        listen,
        json.dumps(settings or {}),
        output=log,
        environment={**os.environ, ENDPOINT_VARIABLE: str(endpoint_file)},
    )
    return BrokerProcess(process=process, endpoint_file=endpoint_file, log=log)


def eventually(
    condition: Callable[[], Any], what: str = "the condition", within_s: float = PATIENCE_S
) -> None:
    """Return when `condition()` is true; AssertionError after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {within_s} s"
        time.sleep(0.02)


def open_run(
    redis_url: str,
    *,
    budget: int = 64 * CHARGE,
    session_timeout_ms: int = 30_000,
    weights: bytes = b"weights-1",
    wait_s: float = PATIENCE_S,
    max_log_entries: int = 10_000,
    unroll_length: int = STEPS,
) -> LearnerLog:
    """A learner that has taken the lease, opened the run and published once."""
    log = LearnerLog.connect(redis_url, wait_s=wait_s)
    log.acquire(RUN, "learner", 15_000)
    pacing = Pacing(
        budget=budget,
        fragment_charge=CHARGE,
        actor_count=1,
        lock_step=False,
        session_timeout_ms=session_timeout_ms,
        max_log_bytes=2**28,
        max_log_entries=max_log_entries,
    )
    given = specification(session_timeout_ms=session_timeout_ms, unroll_length=unroll_length)
    log.start(given.encode(), pacing)
    log.publish(weights, update=0, settled=0, scalars={})
    return log
