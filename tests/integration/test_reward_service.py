"""The reward service as a process over TLS: whom it serves, and that its client outlives it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from launch.certificates import Order
from launch.certificates import main as make_certificates
from launch.process import penstock
from penstock.wire.auth import Credentials
from tests.integration.broker_process import BrokerProcess, eventually
from tests.tiny_reward import make_base, make_reward_model, samples
from workloads.rlhf.reward.client import RewardClient
from workloads.rlhf.reward.source import BadReward

RUN: Final = "run-a"
PATIENCE_S: Final = 120.0


@contextmanager
def serving(model: Path, certificates: Path, folder: Path, listen: str) -> Iterator[BrokerProcess]:
    """`penstock reward serve`, ready."""
    folder.mkdir()
    endpoints, log = folder / "reward.json", folder / "reward.log"
    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_authority": "authority.pem"}
    said = [f"security.{key}={json.dumps(str(certificates / name))}" for key, name in files.items()]
    more = [word for text in (f"run={RUN}", *said) for word in ("--set", text)]
    command = penstock(
        "reward", "serve", str(model), "--listen", listen, "--endpoints", str(endpoints), *more
    )
    with log.open("ab") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
    server = BrokerProcess(process=process, endpoint_file=endpoints, log=log)
    try:
        eventually(server.is_ready, "readiness of the reward service", within_s=PATIENCE_S)
        yield server
    finally:
        server.end()


def shown(certificates: Path, name: str) -> Credentials:
    """What a caller of this name shows."""
    return Credentials.from_files(
        insecure=False,
        certificate=certificates / f"{name}.pem",
        key=certificates / f"{name}.key",
        authority=certificates / "authority.pem",
    )


def test_actors_of_the_run_are_served_and_outlive_the_service(tmp_path: Path) -> None:
    """Scores are the model's own; a call that finds nobody after `kill -9` is answered by the one that comes back."""
    scores = make_reward_model(make_base(tmp_path / "base", steps=1), tmp_path / "reward")
    certificates = tmp_path / "certificates"
    make_certificates(Order(folder=certificates, run=RUN))
    with serving(tmp_path / "reward", certificates, tmp_path / "first", "127.0.0.1:0") as first:
        address = first.address
        client = RewardClient(address, credentials=shown(certificates, "actor"), deadline_s=PATIENCE_S)
        assert client.score(samples()).values == pytest.approx(scores, abs=1e-6)
        for name in ("client", "operator"):
            other = RewardClient(address, credentials=shown(certificates, name), deadline_s=PATIENCE_S)
            with pytest.raises(BadReward, match="PERMISSION_DENIED"):
                other.score(samples())
            other.close()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.score, samples())
        with serving(tmp_path / "reward", certificates, tmp_path / "second", address) as second:
            assert asked.result(PATIENCE_S).values == pytest.approx(scores, abs=1e-6)
            assert "penstock_rewards_total 20.0" in second.get("/metrics")[1]
            client.close()
            second.process.send_signal(signal.SIGTERM)
            assert 0 == second.process.wait(PATIENCE_S), second.log.read_text()
