"""A run is trained, its folder served, and clients in two languages solve the task with what it answers."""

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.run import harness
from tests.support.run.harness import Training
from tests.support.serving import node_client

EXAMPLE: Final = Path(__file__).resolve().parents[2] / "examples" / "python" / "cartpole_client.py"
EPISODES: Final = 20
PATIENCE_S: Final = 300.0


@pytest.mark.promise("clients-python-node-js")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clients_in_python_and_node_solve_cartpole_by_what_a_run_has_learned(tmp_path: Path) -> None:
    node_client.install()
    training = Training(tmp_path / "run", "CartPole-v1", "--seed", "1")
    code, _, errors = training.end(PATIENCE_S)
    assert code == 0, errors
    assert training.summary()["solved"]
    with harness.server(tmp_path, training.run_dir) as server:
        played = subprocess.run(
            [sys.executable, str(EXAMPLE), server.address, str(EPISODES)],
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        returns = [float(line) for line in played.stdout.splitlines()]
        assert (len(returns), statistics.fmean(returns) >= 475) == (EPISODES, True), returns
        result = node_client.play(server.address, EPISODES)
        assert (result["episodes"], result["mean_return"] >= 475) == (EPISODES, True), result
