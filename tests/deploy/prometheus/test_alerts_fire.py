"""Alerts on processes fire for real: the cause brought about in a run that goes on, then removed."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.prometheus.alert_scenes import (
    ENDLESS,
    FASTER,
    Scene,
    launcher_stopped,
    seen,
    slowed,
    stopped,
    training,
)
from tests.deploy.prometheus.prometheus_server import needs_prometheus, watching
from tests.support.language.agents_run import agent, agents_run, gateway
from tests.support.language.tiny_models import make_guesser
from tests.support.run.harness import Training

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """`penstock train` with two actors, on its way."""
    with training(tmp_path_factory.mktemp("fires") / "run", "CartPole-v1", "--actors=2", *ENDLESS) as running:
        yield running


@pytest.fixture(scope="module")
def scene(run: Training, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with seen(tmp_path_factory.mktemp("prometheus"), run) as scene:
        yield scene


def test_a_stalled_learner_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.follows("PenstockNoProgress", stopped(run, "learner"))


def test_a_learner_that_was_killed_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockNoProgress")
    with launcher_stopped(run):
        os.kill(run.pids()["learner"], signal.SIGKILL)
        scene.fires("PenstockNoProgress")
    scene.clears("PenstockNoProgress")


def test_a_learner_that_is_slow_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockLearnerSaturated")
    with slowed(run, "learner", still_s=0.9, going_s=0.1):
        scene.fires("PenstockLearnerSaturated")
        scene.until_seen("penstock:actors_wanted / penstock:actors < 1")
    scene.clears("PenstockLearnerSaturated")


def test_a_learner_without_experience_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.follows("PenstockLearnerStarving", stopped(run, "actor-0", "actor-1"))


def test_an_actor_stalled_within_a_fragment_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.follows("PenstockStale", slowed(run, "actor-1", still_s=6.0, going_s=0.5))


def test_a_broker_that_is_slow_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.follows("PenstockAckSlow", slowed(run, "broker", still_s=2.5, going_s=0.2))


def test_a_redis_that_does_not_answer_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.follows("PenstockRedisDown", stopped(run, "redis"))


def test_actors_that_die_again_and_again_raise_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockRestarting")
    over = threading.Event()
    killer = threading.Thread(target=_kill_twice, args=(run, over))
    killer.start()
    try:
        scene.fires("PenstockRestarting")
    finally:
        over.set()
        killer.join()
    scene.clears("PenstockRestarting")


def _kill_twice(run: Training, over: threading.Event) -> None:
    for _ in range(2):
        pids = run.pids()
        for name in ("actor-0", "actor-1"):
            with suppress(ProcessLookupError):  # it has died of its own: as good
                os.kill(pids[name], signal.SIGKILL)
        while not over.wait(0.05):
            now = run.pids()
            if all(now[name] != pids[name] for name in ("actor-0", "actor-1")):
                break


ENGINE: Final = """
import dataclasses
import pathlib
from penstock.workloads.language.engine import ContinuousEngine
from penstock.workloads.language.engine import LoadedPolicies

class Forgetful(ContinuousEngine):
    def submit(self, request, *rest):
        if pathlib.Path({forgets!r}).exists():
            request = dataclasses.replace(request, version=0)
        return super().submit(request, *rest)

def make(policy, **own):
    return Forgetful(LoadedPolicies(policy), **own)
"""
"""While a file lies there it draws from the base model, and says that the adapter did; its probe is right."""
CONVERSATIONS: Final = 1_000_000


def install(folder: Path, forgets: Path) -> Path:
    metadata = folder / "their_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "their_engine.py").write_text(ENGINE.format(forgets=str(forgets)))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[penstock.engines]\ntheirs = their_engine:make\n")
    return folder


def test_an_engine_that_samples_from_weights_other_than_named_raises_an_alert(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgets, socket = tmp_path / "forgets", short_folder / "text.sock"
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "packages", forgets)))
    base = make_guesser(tmp_path / "base", steps=40)
    with (
        agents_run(tmp_path, socket, base, batch_steps=128, engine="theirs") as run,
        watching(tmp_path / "prometheus", run.run_dir / "targets.json", faster=FASTER) as prometheus,
        gateway(socket, tmp_path) as base_url,
        agent("opening", base_url, CONVERSATIONS),
    ):
        scene = Scene(prometheus)
        scene.until_seen("penstock_updates_total > 20")
        scene.until_seen("penstock_engine_difference_nats > 0")
        scene.clears("PenstockEngineDifference")
        forgets.touch()
        scene.fires("PenstockEngineDifference")
        scene.until_seen("penstock_probe_mismatches_total == 0")
        forgets.unlink()
        scene.clears("PenstockEngineDifference")
