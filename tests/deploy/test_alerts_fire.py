"""Alerts on processes fire for real: the cause brought about in a run that goes on, then removed."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.deploy.alert_scenes import ENDLESS, Scene, launcher_stopped, seen, slowed, stopped, training
from tests.deploy.prometheus_server import needs_prometheus
from tests.support.run.training import Training

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


def test_a_learner_that_stands_still(scene: Scene, run: Training) -> None:
    scene.clears("PenstockNoProgress")
    with stopped(run, "learner"):
        scene.fires("PenstockNoProgress")
    scene.clears("PenstockNoProgress")


def test_a_learner_that_was_killed(scene: Scene, run: Training) -> None:
    scene.clears("PenstockNoProgress")
    with launcher_stopped(run):
        os.kill(run.pids()["learner"], signal.SIGKILL)
        scene.fires("PenstockNoProgress")
    scene.clears("PenstockNoProgress")


def test_a_learner_that_is_slow(scene: Scene, run: Training) -> None:
    scene.clears("PenstockLearnerSaturated")
    with slowed(run, "learner", still_s=0.9, going_s=0.1):
        scene.fires("PenstockLearnerSaturated")
        scene.until_seen("penstock:actors_wanted / penstock:actors < 1")
    scene.clears("PenstockLearnerSaturated")


def test_a_learner_without_experience(scene: Scene, run: Training) -> None:
    scene.clears("PenstockLearnerStarving")
    with stopped(run, "actor-0", "actor-1"):
        scene.fires("PenstockLearnerStarving")
    scene.clears("PenstockLearnerStarving")


def test_an_actor_that_stands_still_in_the_middle_of_its_fragments(scene: Scene, run: Training) -> None:
    scene.clears("PenstockStale")
    with slowed(run, "actor-1", still_s=6.0, going_s=0.5):
        scene.fires("PenstockStale")
    scene.clears("PenstockStale")


def test_a_broker_that_is_slow(scene: Scene, run: Training) -> None:
    scene.clears("PenstockAckSlow")
    with slowed(run, "broker", still_s=2.5, going_s=0.2):
        scene.fires("PenstockAckSlow")
    scene.clears("PenstockAckSlow")


def test_a_redis_that_does_not_answer(scene: Scene, run: Training) -> None:
    scene.clears("PenstockRedisDown")
    with stopped(run, "redis"):
        scene.fires("PenstockRedisDown")
    scene.clears("PenstockRedisDown")


def test_actors_that_die_again_and_again(scene: Scene, run: Training) -> None:
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
