"""A policy server played by another language: nothing of ours but the `.proto` files is there."""

from collections.abc import Iterator

import pytest

from benchmarks.serving import make_run
from penstock.client import PolicyClient
from tests.support.run.broker_process import BrokerProcess
from tests.support.run.serving_run import serving
from tests.support.serving import node_client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    node_client.install()
    folder = tmp_path_factory.mktemp("node")
    make_run(folder / "run")
    with serving(folder, folder / "run") as process:
        yield process


@pytest.mark.parametrize("learn", [True, False])
def test_a_node_client_plays_episodes_and_sends_rewards(server: BrokerProcess, learn: bool) -> None:
    result = node_client.play(server.address, 3, learn=learn)
    assert result["episodes"] == 3
    assert 8 <= result["mean_return"] <= 500
    with PolicyClient(server.address) as client:
        assert not client.describe().learns
