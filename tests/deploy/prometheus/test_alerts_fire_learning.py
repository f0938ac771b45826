"""Alerts on what is learned from, and with what, fire for real.

The cause brought about in a run, then removed.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from penstock.broker.log import keys
from penstock.protocol.limits import MIB
from tests.deploy.prometheus.alert_scenes import (
    ENDLESS,
    Scene,
    going_on,
    launcher_stopped,
    seen,
    slowed,
    stranger,
    training,
)
from tests.deploy.prometheus.prometheus_server import needs_prometheus, watching
from tests.support.network.proxy import Proxy
from tests.support.run.harness import Training

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(1200)]

ABSURD: Final = """
import pathlib
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
ONCE, ALWAYS = map(pathlib.Path, ("once", "always"))
class Absurd(CartPoleEnv):
    def step(self, action):
        seen, reward, terminated, *rest = super().step(action)
        if not terminated and self.is_due():
            seen[3] = 1e9
        return seen, reward, terminated, *rest
    def is_due(self):
        try:
            ONCE.unlink()
        except FileNotFoundError:
            return ALWAYS.exists()
        return True
gymnasium.register("Absurd-v0", Absurd, max_episode_steps=500)
"""
"""CartPole with the largest angular velocity that is trained on; with SETTINGS it overflows the gradient.

At the next step where a file `once` lies, at every step beside `always`; but for what an episode ends with,
which has no value.
"""
SETTINGS: Final = (
    "--set=policy.activation=relu",
    "--set=policy.normalise_observations=false",
    "--set=algorithm.batch_steps=512",
    "--set=algorithm.epochs=1",
    "--set=algorithm.minibatches=1",
    "--set=algorithm.stale_after=1000000",
    "--set=algorithm.value_coefficient=1e9",
    "--set=algorithm.max_log_ratio=1e9",
    "--set=actor.unroll_length=32",
    "--set=environment.count=16",
)
"""One fragment is one update: where there are more of them the update is that of the others."""
FOUR_AT_ONCE: Final = "--set=algorithm.batch_steps=2048"
"""Fragments of an update; an observation between two of them is in both."""
HEAVY: Final = (
    "--set=policy.hidden_sizes=[600, 600]",
    "--set=learner.checkpoint_interval_s=2",
    "--set=learner.keep_every_updates=10",
)
"""Weights that are fetched in pieces: more than 1 MiB."""


@contextmanager
def absurd(folder: Path, *words: str) -> Iterator[Training]:
    """A run of ABSURD, which lies in `folder`."""
    (folder / "absurd.py").write_text(ABSURD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with training(folder / "run", "absurd:Absurd-v0", *ENDLESS, *SETTINGS, *words, steps=5_000) as run:
            yield run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """`penstock train` with two actors and large weights, which trains on whatever age."""
    with absurd(tmp_path_factory.mktemp("learning"), "--actors=2", *HEAVY) as running:
        yield running


@pytest.fixture(scope="module")
def scene(run: Training, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with seen(tmp_path_factory.mktemp("prometheus"), run) as scene:
        yield scene


def test_an_update_that_is_not_finite_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockNotFinite")
    (run.run_dir.parent / "once").touch()
    scene.fires("PenstockNotFinite")
    scene.clears("PenstockNotFinite")


def test_a_fragment_left_out_of_an_update_raises_an_alert(tmp_path: Path) -> None:
    with absurd(tmp_path, "--actors=1", FOUR_AT_ONCE) as run, seen(tmp_path / "prometheus", run) as scene:
        scene.clears("PenstockNotFinite")
        (tmp_path / "once").touch()
        scene.fires("PenstockNotFinite")
        scene.until_seen('penstock_ledger_dropped_fragments{reason="nan"} > 0')
        scene.until_seen('penstock_updates_skipped_total{reason="nan"} == 0')
        scene.clears("PenstockNotFinite")


def test_an_actor_that_stalls_now_and_then_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.follows("PenstockStalenessOverBound", slowed(run, "actor-1", still_s=5.0, going_s=0.5))


def test_an_actor_without_new_weights_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockActorLag")
    with through_proxy(run) as proxy:
        kill(run, "actor-1")
        run.until(lambda: proxy.bytes_forwarded > 2 * MIB)
        scene.until_seen('penstock_weight_version_applied{instance="actor-1"} > 0')
        proxy.set(bytes_per_s=20_000)
        scene.fires("PenstockActorLag")
        kill(run, "actor-1")
        scene.until_seen('max_over_time(penstock_weight_version_applied{instance="actor-1"}[20s]) == 0')
        scene.fires("PenstockActorLag")
        proxy.heal()
        scene.clears("PenstockActorLag")


def kill(run: Training, name: str) -> None:
    """`kill -9`; returns when the launcher has started it again."""
    os.kill(pid := run.pids()[name], signal.SIGKILL)
    run.until(lambda: run.pids().get(name) not in (None, pid))


@contextmanager
def through_proxy(run: Training) -> Iterator[Proxy]:
    """Connections to the broker from now on go through a network that a test commands."""
    endpoint = json.loads((run.run_dir / "endpoints.json").read_text())["broker"]
    address = Path(endpoint["address"].removeprefix("unix:"))
    real = address.rename(address.with_name("real.sock"))
    with Proxy(f"unix:{real}") as proxy:
        address.symlink_to(proxy.address.removeprefix("unix:"))
        try:
            yield proxy
        finally:
            real.rename(address)


def test_an_actor_that_does_not_act_with_the_weights_it_names_raises_an_alert(
    scene: Scene, run: Training
) -> None:
    scene.clears("PenstockProbeMismatch")
    with stranger(run) as actor:

        def lie() -> None:
            latest = actor.watch().latest
            actor.watch(applied_version=latest.version, applied_sha256=latest.sha256, probe_log_prob=[1.0])

        with going_on(lie):
            scene.fires("PenstockProbeMismatch")
    scene.clears("PenstockProbeMismatch")


def test_experience_that_was_altered_in_redis_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockExperienceDamaged")
    with redis.Redis.from_url(redis_of(run)) as client:

        def damage() -> None:
            if client.exists(keys.CONVICTED):
                return
            for key in client.scan_iter(keys.PAYLOAD + "*"):
                client.setrange(key, 0, b"\xff" * client.strlen(key))

        with going_on(damage):
            scene.fires("PenstockExperienceDamaged")
    scene.clears("PenstockExperienceDamaged")


def test_a_damaged_checkpoint_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockCheckpointRefused")
    with launcher_stopped(run):
        os.kill(run.pids()["learner"], signal.SIGKILL)
        newest = run.run_dir / "checkpoints" / committed(run) / "state.json"
        newest.write_bytes(newest.read_bytes()[:-1])
    scene.fires("PenstockCheckpointRefused")
    damaged = newest.parent.name
    run.until(lambda: committed(run) != damaged)
    kill(run, "learner")
    scene.clears("PenstockCheckpointRefused")


def redis_of(run: Training) -> str:
    return str(json.loads((run.run_dir / "endpoints.json").read_text())["redis"]["address"])


def committed(run: Training) -> str:
    """The newest checkpoint that counts."""
    with redis.Redis.from_url(redis_of(run)) as client:
        newest: Any = client.lindex(keys.COMMITS, -1)
    return str(json.loads(newest)["checkpoint_id"])


def test_a_registry_that_fails_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockRegistryFailing")
    before = committed(run)
    run.until(lambda: committed(run) != before)  # a learner that was just started needs the folder
    policies = run.run_dir / "policies"
    aside = policies.rename(policies.with_name("aside"))
    policies.touch()
    try:
        scene.fires("PenstockRegistryFailing")
    finally:
        policies.unlink()
        aside.rename(policies)
    scene.clears("PenstockRegistryFailing")


@pytest.mark.promise("metrics-show-updates-finite")
def test_updates_that_end_the_run_raise_an_alert(tmp_path: Path) -> None:
    with (
        absurd(tmp_path, "--actors=1") as run,
        watching(tmp_path / "prometheus", run.run_dir / "targets.json", every_s=15) as prometheus,
    ):
        scene = Scene(prometheus)
        scene.until_seen('penstock_updates_skipped_total{reason="nan"} == 0')
        (tmp_path / "always").touch()
        code, _, said = run.end(600)
        assert (code, "3 updates in a row were not finite" in said.splitlines()[-1]) == (1, True), said
        scene.fires("PenstockNotFinite")
