import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from penstock.gateway.jobs.job_records import Stage
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.run.supervisor import penstock
from penstock.runtime.health import Endpoint, read_endpoint

# ---- A gateway as a process of its own, in a folder, on a free port.


PATIENCE_S: Final = 150.0


class GatewayProcess:
    """`penstock gateway` with the options given. Entering waits until it serves; leaving ends it."""

    _count = 0

    def __init__(self, folder: Path, *options: str) -> None:
        GatewayProcess._count += 1
        self.log = folder / f"gateway-{GatewayProcess._count}.log"
        self._endpoints = folder / f"gateway-{GatewayProcess._count}.json"
        words = ("gateway", "--listen", "127.0.0.1:0", "--endpoints", str(self._endpoints))
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                penstock(*words, *options), cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def __enter__(self) -> Self:
        self._endpoint = self._await()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.end()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self._endpoint.address}"

    @property
    def metrics_url(self) -> str:
        """Where its metrics are."""
        return f"http://127.0.0.1:{self._endpoint.metrics_port}/metrics"

    @property
    def endpoint(self) -> Endpoint:
        """All of where it is."""
        return self._endpoint

    def end(self) -> int:
        """Ask it to end; returns its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def _await(self) -> Endpoint:
        deadline = time.monotonic() + PATIENCE_S
        while (found := read_endpoint(self._endpoints)) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found


# ---- Ends the jobs that a test leaves behind: they do not end with their gateway, by design.


def end_jobs(folder: Path) -> None:
    """Kill what lives of the jobs of every gateway below a folder."""
    for begun in folder.rglob("jobs/*/begun.json"):
        jobs = begun.parents[1]
        templates = folder / "no-templates"
        if LocalRunner(jobs, templates).find(begun.parent.name) is Stage.GOING_ON:
            group = json.loads(begun.read_text())["group"]
            os.killpg(group, signal.SIGKILL)
