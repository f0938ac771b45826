"""What services do where something else probes them, and starts again whatever ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from penstock.config.settings import dump
from penstock.runtime.health import ENDPOINT_VARIABLE
from tests.support.run.harness import BrokerProcess, eventually
from tests.support.run.learner_run import BATCH, Producer, settings

PENSTOCK: Final = str(Path(sys.executable).with_name("penstock"))
PATIENCE_S: Final = 90.0


@contextmanager
def service(folder: Path, *words: str) -> Iterator[BrokerProcess]:
    """A `penstock` command, with its HTTP port on 127.0.0.1; killed at the end."""
    endpoint, log = folder / "endpoint.json", folder / "log"
    environment = {**os.environ, ENDPOINT_VARIABLE: str(endpoint), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen([PENSTOCK, *words], stdout=file, stderr=file, env=environment)
    started = BrokerProcess(process=process, endpoint_file=endpoint, log=log)
    try:
        yield started
    finally:
        started.end()


@pytest.mark.promise("learner-finished-stays-alive")
def test_a_learner_that_is_done_stays_until_it_is_asked_to_end(redis_url: str, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(dump(settings(learner={"total_steps": 2 * BATCH, "stop_at_target": False})))
    run_dir = tmp_path / "run"
    words = ("learner", "--redis", redis_url, "--run-dir", str(run_dir), "--config", str(config))
    with service(tmp_path, *words, "--resume", "--stay") as learner, Producer(redis_url) as producer:
        session = producer.open()
        producer.drive([session], (run_dir / "learner.json").exists)
        eventually(lambda: producer.status().latest.update >= 2, "the last update", PATIENCE_S)
        assert json.loads((run_dir / "learner.json").read_text())["finished"]
        assert learner.process.poll() is None
        assert learner.get("/healthz")[0] == learner.get("/readyz")[0] == 200
        learner.process.send_signal(signal.SIGTERM)
        assert learner.process.wait(PATIENCE_S) == 0


def test_a_policy_server_is_alive_before_there_is_a_run(tmp_path: Path) -> None:
    port = free_port()
    address = ("--broker", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--set", f"metrics.port={port}")
    with service(tmp_path, "serve", *address) as server:
        server.endpoint_file.write_text(json.dumps({"role": "server", "pid": 0, "metrics_port": port}))
        eventually(lambda: b"127.0.0.1:1" in server.log.read_bytes(), "a word about the broker", PATIENCE_S)
        assert server.get("/healthz") == (200, "ok\n")
        assert server.get("/readyz") == (503, "starting\n")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
