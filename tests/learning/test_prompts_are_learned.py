"""Mutations of prompts are learned from embeddings alone, on prompts that training never saw.

Scores lie between random mutations (0) and the exact optimum (1): `tests.support.prompts.judged_prompts`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock.workloads.prompts.task_parts import PromptSource
from tests.support.prompts.judged_prompts import fixed, judge, train
from tests.support.prompts.prompts_gateway import end_run
from tests.support.run.harness import Training
from tests.support.serving import node_client

SMALL: Final = (
    "policy.hidden_sizes=[64, 64]", "policy.hidden_norm=none", "policy.dropout=0", "policy.activation=tanh",
    "policy.initialisation=orthogonal", "algorithm.learning_rate=2e-3", "algorithm.minibatches=16",
)  # fmt: skip
"""A network that is trained in seconds."""
PATIENCE_S: Final = 280.0


def test_a_small_network_beats_the_best_fixed_sequence(tmp_path: Path) -> None:
    options = [word for setting in SMALL for word in ("--set", setting)]
    run = tmp_path / "run"
    recipe = "penstock/recipes/prompts.toml"
    Training(run, recipe, "--seed", "1", "--total-steps", "24576", *options).completed(PATIENCE_S)
    found, beside = judge(run, "builtin"), fixed("builtin")
    assert found.score >= 0.75
    assert found.score - beside.score > 2 * (found.error + beside.error)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_recipe_gets_within_a_fifth_of_the_optimum(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("chatterbot_corpus", reason="needs the extra data")
    train(seed, tmp_path / "run")
    found, beside = judge(tmp_path / "run"), fixed()
    assert found.score >= 0.8
    assert found.score - beside.score > 2 * (found.error + beside.error)


PACKAGE: Final = Path(__file__).resolve().parents[2] / "clients" / "typescript"
EPISODES: Final = 2500
UPDATE: Final = 400
NODE_PATIENCE_S: Final = 1400.0


class Node:
    def __init__(self, folder: Path, port: int) -> None:
        self.result, self.log = folder / "result.json", folder / "node.log"
        options = {"episodes": EPISODES, "update": UPDATE, "parallel": 8, "port": port}
        places = {"state": folder / "state", "prompts": folder / "prompts.json", "json": self.result}
        words = [f"--{name}={value}" for name, value in (options | places).items()]
        words += [f"--train={one}" for one in SMALL]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(PACKAGE / "node_modules" / ".bin" / "tsx"), str(PACKAGE / "demo.ts"), "--full", *words],
                cwd=folder,
                env=os.environ | {"VIRTUAL_ENV": sys.prefix},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_episode(self, number: int) -> None:
        until_s = time.monotonic() + NODE_PATIENCE_S
        while f"episode {number}:" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until_s, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_node_process_alone_beats_the_best_fixed_sequence(tmp_path: Path) -> None:
    node_client.install(PACKAGE)
    source, random = PromptSource("builtin", "train"), np.random.default_rng(1)
    drawn = {source.draw(random)[0] for _ in range(4000)}
    (tmp_path / "prompts.json").write_text(json.dumps(sorted(drawn)))
    try:
        first = Node(tmp_path, _free_port())
        first.await_episode(2 * UPDATE)
        first.kill()
        second = Node(tmp_path, _free_port())
        assert second.process.wait(NODE_PATIENCE_S) == 0, second.log.read_text()[-4000:]
    finally:
        end_run(tmp_path / "state")
    played = json.loads(second.result.read_text())
    assert played["last"] - played["first"] > 2 * played["standard_error"]
    summary = json.loads((tmp_path / "state" / "run" / "summary.json").read_text())
    assert summary["ledger"]["balanced"]
    assert summary["env_steps"] >= 5 * (EPISODES + 2 * UPDATE)
    found, beside = judge(tmp_path / "state" / "run", "builtin"), fixed("builtin")
    assert found.score >= 0.75
    assert found.score - beside.score > 2 * (found.error + beside.error)
