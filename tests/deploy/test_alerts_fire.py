"""Alerts fire for real: a real Prometheus with the shipped rules, the cause brought about, then removed.

Every duration in the rules is divided by FASTER and by nothing else: ten minutes become ten seconds.
"""

import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from broker.state import Commit
from launch.certificates import Order
from launch.certificates import main as certificates
from launch.process import penstock
from penstock.client import PolicyClient
from penstock.registry.records import Status
from tests.deploy.prometheus_server import WatchingPrometheus, needs_prometheus, watching
from tests.integration.broker_process import BrokerProcess, eventually, launch
from tests.integration.serving_run import ServedRun, serving
from tests.integration.simulated_actor import SimulatedActor
from tests.integration.training import Training, wait_until_gone
from tests.store_run import open_run

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(1200)]

FASTER: Final = 60
PATIENCE_S: Final = 240.0
LONG: Final = ("CartPole-v1", "--actors=2", "--total-steps=1000000000", "--set=learner.stop_at_target=false")


class Scene:
    """Something that goes on, under Prometheus's eyes."""

    def __init__(self, prometheus: WatchingPrometheus) -> None:
        self.prometheus = prometheus

    def fires(self, *alerts: str) -> None:
        """Wait until all of them fire."""
        self.prometheus.until(lambda: set(alerts) <= self.prometheus.firing(), f"{alerts}", PATIENCE_S)

    def clears(self, *alerts: str) -> None:
        """Wait until none of them fires."""
        self.prometheus.until(lambda: not set(alerts) & self.prometheus.firing(), f"no {alerts}", PATIENCE_S)


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """`penstock train` with two actors, on its way."""
    running = Training(tmp_path_factory.mktemp("fires") / "run", *LONG)
    try:
        running.until_steps(20_000)
        yield running
    finally:
        running.process.terminate()
        running.process.communicate()
        wait_until_gone(running)


@pytest.fixture(scope="module")
def scene(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """With a Prometheus that has seen it for a while."""
    folder = tmp_path_factory.mktemp("prometheus")
    with watching(folder, training.run_dir / "targets.json", faster=FASTER) as prometheus:
        scene = Scene(prometheus)
        prometheus.until(lambda: bool(prometheus.query("penstock:actors_wanted")), "the rules")
        yield scene


@contextmanager
def stopped(training: Training, *names: str) -> Iterator[None]:
    """Services stand still: SIGSTOP."""
    pids = [training.pids()[name] for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(training: Training, name: str, *, still_s: float, going_s: float) -> Iterator[None]:
    """A service stands still most of the time."""
    pid, over = training.pids()[name], threading.Event()

    def hold() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(still_s)
            os.kill(pid, signal.SIGCONT)
            over.wait(going_s)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_learner_that_stands_still(scene: Scene, training: Training) -> None:
    """No progress; and none is missed once it goes on."""
    scene.clears("PenstockNoProgress")
    with stopped(training, "learner"):
        scene.fires("PenstockNoProgress")
    scene.clears("PenstockNoProgress")


def test_a_learner_that_was_killed(scene: Scene, training: Training) -> None:
    """No progress either, while its launcher cannot start it again."""
    scene.clears("PenstockNoProgress")
    training.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(training.pids()["learner"], signal.SIGKILL)
        scene.fires("PenstockNoProgress")
    finally:
        training.process.send_signal(signal.SIGCONT)
    scene.clears("PenstockNoProgress")


def test_a_learner_that_is_slow(scene: Scene, training: Training) -> None:
    """The workers wait for it, and fewer of them are wanted than there are."""
    scene.clears("PenstockLearnerSaturated")
    with slowed(training, "learner", still_s=0.9, going_s=0.1):
        scene.fires("PenstockLearnerSaturated")
        (series,) = scene.prometheus.query("penstock:actors_wanted / penstock:actors")
        assert float(series["value"][1]) < 1
    scene.clears("PenstockLearnerSaturated")


def test_a_learner_without_experience(scene: Scene, training: Training) -> None:
    """It starves: its actors stand still."""
    scene.clears("PenstockLearnerStarving")
    with stopped(training, "actor-0", "actor-1"):
        scene.fires("PenstockLearnerStarving")
    scene.clears("PenstockLearnerStarving")


def test_a_broker_that_is_slow(scene: Scene, training: Training) -> None:
    """Acknowledgements take more than a second."""
    scene.clears("PenstockAckSlow")
    with slowed(training, "broker", still_s=2.5, going_s=0.2):
        scene.fires("PenstockAckSlow")
    scene.clears("PenstockAckSlow")


def test_a_redis_that_does_not_answer(scene: Scene, training: Training) -> None:
    """The broker says so as long as it lasts."""
    scene.clears("PenstockRedisDown")
    with stopped(training, "redis"):
        scene.fires("PenstockRedisDown")
    scene.clears("PenstockRedisDown")


def test_actors_that_die_again_and_again(scene: Scene, training: Training) -> None:
    """Each is started again; four deaths within the alert's window are too many."""
    scene.clears("PenstockRestarting")
    over = threading.Event()
    killer = threading.Thread(target=_kill_twice, args=(training, over))
    killer.start()
    try:
        scene.fires("PenstockRestarting")
    finally:
        over.set()
        killer.join()
    scene.clears("PenstockRestarting")


def _kill_twice(training: Training, over: threading.Event) -> None:
    for _ in range(2):
        pids = training.pids()
        for name in ("actor-0", "actor-1"):
            with suppress(ProcessLookupError):  # it has died of its own: as good
                os.kill(pids[name], signal.SIGKILL)
        while not over.wait(0.05):
            now = training.pids()
            if all(now[name] != pids[name] for name in ("actor-0", "actor-1")):
                break


# ---------------------------------------------------------------- single services


def targets(file: Path, **services: BrokerProcess) -> Path:
    """As the launcher writes them."""
    content = [
        {"targets": [f"127.0.0.1:{one.endpoint.metrics_port}"], "labels": {"run": "a", "instance": name}}
        for name, one in services.items()
    ]
    file.write_text(json.dumps(content))
    return file


@contextmanager
def watched(folder: Path, **services: BrokerProcess) -> Iterator[Scene]:
    """Prometheus over single services."""
    file = targets(folder / "targets.json", **services)
    with watching(folder / "prometheus", file, faster=FASTER) as prometheus:
        prometheus.until(lambda: len(prometheus.query("up == 1")) == len(services), "the services")
        yield Scene(prometheus)


@contextmanager
def going_on(act: Callable[[], Any]) -> Iterator[None]:
    """Somebody does this again and again."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(0.05):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_log_that_fills_up(tmp_path: Path, redis_url: str) -> None:
    """Near its ceiling, then full; a learner that commits and trims frees it."""
    learner = open_run(redis_url, max_log_bytes=8192, budget=10**6)
    with ExitStack() as stack:
        broker = launch(redis_url, tmp_path)
        stack.callback(broker.end)
        eventually(broker.is_ready, "the broker")
        scene = stack.enter_context(watched(tmp_path, broker=broker))
        actor = stack.enter_context(SimulatedActor(broker.address, "actor-0"))
        actor.open()
        assert not scene.prometheus.firing() & {"PenstockLogNearCeiling", "PenstockLogFull"}

        def offer() -> None:
            actor.watch()
            actor.send_all_with_leave(at_most=1)

        with going_on(offer):
            scene.fires("PenstockLogNearCeiling", "PenstockLogFull")
        head = learner.read(0, 10**6, 0)[-1].number
        for name in ("first", "second"):
            learner.commit(Commit(checkpoint_id=name, manifest_sha256="aa", position=head, trim=head))
        scene.clears("PenstockLogNearCeiling", "PenstockLogFull")


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
        scene = stack.enter_context(watched(tmp_path, broker=broker))
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
    settings: dict[str, Any] = {"canary_return_range": [0.0, 1.0], "canary_slow_ms": 1e6}
    with (
        serving(tmp_path, run.folder, **settings) as server,
        watched(tmp_path, server=server) as scene,
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
