"""Alerts on versions and certificates fire for real: the cause brought about at a process, then removed."""

import itertools
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.commands.certificates import Order
from launch.commands.certificates import main as certificates
from launch.run.child_process import penstock
from penstock.client import PolicyClient
from penstock.registry.records import Status
from tests.deploy.alert_scenes import going_on, watched
from tests.deploy.prometheus_server import needs_prometheus
from tests.support.run.broker_process import BrokerProcess, eventually
from tests.support.run.serving_run import ServedRun, serving

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_certificate_that_runs_out(tmp_path: Path, redis_url: str) -> None:
    """Replaced while the broker runs."""
    certificates(Order(folder=tmp_path / "tls", run="run-a", days=3))
    security = {"certificate": "broker.pem", "key": "broker.key", "authority": "authority.pem"}
    said = [f"--set=security.tls_{name}={tmp_path / 'tls' / file}" for name, file in security.items()]
    endpoint, log = tmp_path / "broker.json", tmp_path / "broker.log"
    words = penstock(
        "broker",
        "--redis",
        redis_url,
        "--listen=127.0.0.1:0",
        f"--endpoints={endpoint}",
        "--set=run=run-a",
        *said,
    )
    with log.open("wb") as output, ExitStack() as stack:
        process = subprocess.Popen(words, stdout=output, stderr=output)
        broker = BrokerProcess(process=process, endpoint_file=endpoint, log=log)
        stack.callback(broker.end)
        eventually(broker.is_ready, "the broker")
        scene = stack.enter_context(watched(tmp_path, broker=broker.endpoint))
        scene.fires("PenstockCertificateExpiring")
        certificates(Order(folder=tmp_path / "tls", run="run-a", days=90))
        scene.clears("PenstockCertificateExpiring")


def test_a_canary_that_is_worse(tmp_path: Path) -> None:
    """Its clients earn nothing; it is withdrawn, and the alert passes."""
    run = ServedRun(tmp_path / "run")
    run.describe()
    run.promote(good := run.next_version())
    bad = run.build(good)
    bad.actor_head.weight.data.neg_()
    seen = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    policy = run.policies[good]
    best = int(policy.act({"observation": seen}, deterministic=True).action["action"][0])
    numbers = itertools.count()
    settings: dict[str, Any] = {"canary.settle_s": 0.05, "canary.slow_ms": 1e6}
    with (
        serving(tmp_path, run.folder, **settings) as server,
        watched(tmp_path, server=server.endpoint) as scene,
        PolicyClient(server.address, deadline_s=60.0) as client,
    ):

        def play() -> None:
            episode = client.start_episode(f"client-{next(numbers)}")
            given = episode.act(seen[0], deterministic=True)
            episode.end(terminated=True, reward=float(given.action == best))

        canary = run.next_version(bad)
        run.promote(canary, canary_share=0.3)
        with going_on(play):
            scene.fires("PenstockCanaryWithdrawn")
        assert run.status(canary) is Status.ROLLED_BACK
        scene.clears("PenstockCanaryWithdrawn")
