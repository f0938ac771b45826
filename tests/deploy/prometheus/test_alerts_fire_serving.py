"""Alerts on what is served, on versions and certificates fire for real: their causes come, and go."""

import itertools
import json
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from penstock.client import PolicyClient
from penstock.config.settings import PolicySection
from penstock.launch.commands.certificates import main as certificates
from penstock.launch.commands.request import Order
from penstock.launch.run.supervisor import penstock
from penstock.registry.records import Status
from tests.deploy.prometheus.alert_scenes import ENDLESS, going_on, seen, stopped, training, watched
from tests.deploy.prometheus.prometheus_server import needs_prometheus
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, Training, eventually
from tests.support.run.serving_run import ServedRun

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_an_expiring_certificate_raises_an_alert(tmp_path: Path, redis_url: str) -> None:
    certificates(Order(folder=tmp_path / "tls", run="run-a", days=3))
    security = {"certificate": "broker.pem", "key": "broker.key", "authority": "authority.pem"}
    said = [f"--set=security.tls_{name}={tmp_path / 'tls' / file}" for name, file in security.items()]
    endpoint, log = tmp_path / "broker.json", tmp_path / "penstock.broker.log"
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


def test_a_canary_that_is_worse_raises_an_alert(tmp_path: Path) -> None:
    run = ServedRun(tmp_path / "run")
    run.describe()
    run.promote(good := run.next_version())
    bad = run.build(good)
    bad.actor_head.weight.data.neg_()
    observation = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    policy = run.policies[good]
    best = int(policy.act({"observation": observation}, deterministic=True).action["action"][0])
    numbers = itertools.count()
    settings: dict[str, Any] = {"canary.settle_s": 0.05, "canary.slow_ms": 1e6}
    with (
        harness.server(tmp_path, run.folder, **settings) as server,
        watched(tmp_path, server=server.endpoint) as scene,
        PolicyClient(server.address, deadline_s=60.0) as client,
    ):

        def play() -> None:
            episode = client.start_episode(f"client-{next(numbers)}")
            given = episode.act(observation[0], deterministic=True)
            episode.end(terminated=True, reward=float(given.action == best))

        canary = run.next_version(bad)
        run.promote(canary, canary_share=0.3)
        with going_on(play):
            scene.fires("PenstockCanaryWithdrawn")
        assert run.status(canary) is Status.ROLLED_BACK
        scene.clears("PenstockCanaryWithdrawn")


def test_answers_of_another_version_raise_an_alert(tmp_path: Path) -> None:
    run = ServedRun(tmp_path / "run")
    run.describe()
    broken = run.build(1)
    nn.init.constant_(broken.actor_head.bias, float("nan"))
    run.promote(run.next_version(broken))
    with (
        harness.server(tmp_path, run.folder) as server,
        watched(tmp_path, server=server.endpoint) as scene,
        PolicyClient(server.address, deadline_s=60.0) as client,
        going_on(lambda: client.act(np.zeros(4, np.float32))),
    ):
        scene.fires("PenstockFallbackAnswers")
        run.promote(run.next_version())
        scene.clears("PenstockFallbackAnswers")


def test_answers_that_take_long_raise_an_alert(tmp_path: Path) -> None:
    run = ServedRun(tmp_path / "run", section=PolicySection(hidden_sizes=(4096, 4096)))
    run.describe()
    run.promote(run.next_version())
    many = np.zeros((1024, 4), np.float32)
    with (
        harness.server(tmp_path, run.folder, max_delay_ms=1e6) as server,
        watched(tmp_path, server=server.endpoint) as scene,
        PolicyClient(server.address, deadline_s=60.0) as client,
        going_on(lambda: client.act(many[0])),
    ):
        scene.follows("PenstockAnswersSlow", going_on(lambda: client.act_batch(many)))


def address_of(run: Training) -> str:
    return str(json.loads((run.run_dir / "endpoints.json").read_text())["server"]["address"])


def test_steps_that_are_not_learned_raise_an_alert(tmp_path: Path) -> None:
    room = ("--set=serving.outbox_fragments=2", "--set=algorithm.stale_after=1000000")
    words = ("--actors=1", "--serve=127.0.0.1:0", *room, *ENDLESS)
    with (
        training(tmp_path / "run", "CartPole-v1", *words) as run,
        seen(tmp_path / "prometheus", run) as scene,
        PolicyClient(address_of(run), deadline_s=60.0) as client,
    ):

        def play() -> None:
            episode = client.start_episode()
            for step in range(100):
                episode.act(np.zeros(4, np.float32), reward=1.0 if step else None)
            episode.end(terminated=True, reward=1.0)

        with going_on(play):
            with stopped(run, "broker"):
                scene.fires("PenstockNotLearned")
            scene.clears("PenstockNotLearned")


def test_canaries_that_are_not_judged_or_undecided_raise_an_alert(tmp_path: Path) -> None:
    run = ServedRun(tmp_path / "run")
    run.describe()
    run.promote(good := run.next_version())
    run.promote(canary := run.next_version(run.policies[good]), canary_share=0.3)
    settings: dict[str, Any] = {"canary.settle_s": 0.05, "canary.slow_ms": 1e6, "canary.horizon": 20}
    numbers = itertools.count()
    with (
        harness.server(tmp_path, run.folder, **settings) as server,
        watched(tmp_path, server=server.endpoint) as scene,
        PolicyClient(server.address, deadline_s=60.0) as client,
    ):

        def play(*, is_rewarded: bool) -> None:
            episode = client.start_episode(f"client-{next(numbers)}")
            episode.act(np.zeros(4, np.float32))
            episode.end(terminated=True, reward=1.0 if is_rewarded else None)

        with going_on(lambda: play(is_rewarded=False)):
            scene.fires("PenstockCanaryUnguarded")
        with going_on(lambda: play(is_rewarded=True)):
            scene.clears("PenstockCanaryUnguarded")
            scene.fires("PenstockCanaryUndecided")
            run.promote(canary)
            scene.clears("PenstockCanaryUndecided")
