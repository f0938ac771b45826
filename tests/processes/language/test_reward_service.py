"""The reward service as a process over TLS: whom it serves, and that its client outlives it."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.commands.certificates import main as make_certificates
from penstock.launch.commands.request import Order
from penstock.rpc.auth import Credentials
from penstock.workloads.language.reward.reward_client import RewardClient
from penstock.workloads.language.reward.reward_source import BadReward
from tests.support.language.tiny_models import make_base, make_reward_model, samples
from tests.support.run.harness import SERVER_READY_S, reward_secured, reward_server

RUN: Final = "run-a"


def shown(certificates: Path, name: str) -> Credentials:
    return Credentials.from_files(
        insecure=False,
        certificate=certificates / f"{name}.pem",
        key=certificates / f"{name}.key",
        authority=certificates / "authority.pem",
    )


def test_actors_of_the_run_are_served_and_outlive_the_service(tmp_path: Path) -> None:
    scores = make_reward_model(make_base(tmp_path / "base", steps=1), tmp_path / "reward")
    certificates = tmp_path / "certificates"
    make_certificates(Order(folder=certificates, run=RUN))
    said = reward_secured(certificates, RUN)
    with reward_server(tmp_path / "reward", tmp_path / "first", "127.0.0.1:0", said) as first:
        address = first.address
        client = RewardClient(address, credentials=shown(certificates, "actor"), deadline_s=SERVER_READY_S)
        assert client.score(samples()).values == pytest.approx(scores, abs=1e-6)
        for name in ("client", "operator"):
            other = RewardClient(address, credentials=shown(certificates, name), deadline_s=SERVER_READY_S)
            with pytest.raises(BadReward, match="PERMISSION_DENIED"):
                other.score(samples())
            other.close()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(SERVER_READY_S)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.score, samples())
        with reward_server(tmp_path / "reward", tmp_path / "second", address, said) as second:
            assert asked.result(SERVER_READY_S).values == pytest.approx(scores, abs=1e-6)
            assert "penstock_rewards_total 20.0" in second.get("/metrics")[1]
            client.close()
            second.process.send_signal(signal.SIGTERM)
            assert 0 == second.process.wait(SERVER_READY_S), second.log.read_text()
