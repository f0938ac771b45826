"""A real Prometheus with the shipped rules, looking at a run once a second."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

import pytest

from deploy.grafana.prometheus import Prometheus
from tests.deploy.manifests import ROOT

RULES: Final = ROOT / "deploy" / "prometheus"
PATIENCE_S: Final = 120.0
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on PATH: apt-get install prometheus"
)


@dataclass(frozen=True, kw_only=True)
class WatchingPrometheus(Prometheus):
    def firing(self) -> set[str]:
        alerts = self.get("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def until(self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}; firing: {self.firing()}"
            pause.wait(0.2)


@contextmanager
def watching(folder: Path, *targets: Path, faster: int = 1, every_s: int = 1) -> Iterator[WatchingPrometheus]:
    """A Prometheus over the `targets.json` of runs, ready; ended afterwards.

    every_s: seconds between two looks at a process. faster: every `for` of the alerts, and the range that an
    alert looks back, is divided by it; nothing else is changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("rules.yml", "alerts.yml"):
        (folder / name).write_text(hastened((RULES / name).read_text(), faster))
    (folder / "prometheus.yml").write_text(configuration(*targets, every_s=every_s))
    port = _free_port()
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    prometheus = WatchingPrometheus(port=port)
    try:
        await_ready(process, prometheus, folder / "prometheus.log")
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)


def configuration(*targets: Path, every_s: int = 1) -> str:
    """As deploy/prometheus/local.yml, for these files and looking more often, at the rules once a second."""
    shipped = (RULES / "local.yml").read_text()
    files = json.dumps([str(file.absolute()) for file in targets])
    shipped = shipped.replace('["targets/*.json"]', files).replace(
        "refresh_interval: 5s", "refresh_interval: 1s"
    )
    shipped = shipped.replace("scrape_interval: 5s", f"scrape_interval: {every_s}s")
    return shipped.replace("evaluation_interval: 5s", "evaluation_interval: 1s")


def hastened(rules: str, faster: int) -> str:
    """The rules with every duration divided; none becomes shorter than three looks."""

    def shorter(match: re.Match[str]) -> str:
        seconds = int(match[2]) * {"s": 1, "m": 60, "h": 3600}[match[3]]
        return f"{match[1]}{max(3, seconds // faster)}s{match[4]}"

    if faster == 1:
        return rules
    rules = re.sub(r"(for: )(\d+)([smh])(\n)", shorter, rules)
    return re.sub(r"(\[)(\d+)([smh])(\])", shorter, rules)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def await_ready(process: "subprocess.Popen[bytes]", prometheus: Prometheus, log: Path) -> None:
    """Until it answers; `log` says why it does not."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if prometheus.fetch("/-/ready")[0] == HTTPStatus.OK:
                return
        except OSError:
            pass  # it does not listen yet
        pause.wait(0.1)
    raise AssertionError(f"Prometheus does not become ready: {log.read_text()}")
