"""Mutations of prompts are learned through HTTP from what a Node process does that is killed on the way."""

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
from tests.learning.test_prompts import SMALL
from tests.support.prompts.judged_prompts import fixed, judge
from tests.support.prompts.prompts_gateway import end_run
from tests.support.serving import node_client

PACKAGE: Final = Path(__file__).resolve().parents[2] / "clients" / "typescript"
EPISODES: Final = 2500
UPDATE: Final = 400
PATIENCE_S: Final = 1400.0


class Node:
    """The demonstration of the package, with a server that it starts; it plays prompts of the training."""

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
        """Wait until it has said that it has played so many."""
        until_s = time.monotonic() + PATIENCE_S
        while f"episode {number}:" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until_s, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def kill(self) -> None:
        """End it and its gateway without a word."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_node_process_alone_comes_above_the_best_fixed_sequence(tmp_path: Path) -> None:
    node_client.install(PACKAGE)
    source, random = PromptSource("builtin", "train"), np.random.default_rng(1)
    drawn = {source.draw(random)[0] for _ in range(4000)}
    (tmp_path / "prompts.json").write_text(json.dumps(sorted(drawn)))
    try:
        first = Node(tmp_path, _free_port())
        first.await_episode(2 * UPDATE)
        first.kill()
        second = Node(tmp_path, _free_port())
        assert second.process.wait(PATIENCE_S) == 0, second.log.read_text()[-4000:]
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
