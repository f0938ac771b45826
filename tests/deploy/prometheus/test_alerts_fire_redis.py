"""Alerts on Redis, the log and the books fire for real.

The cause brought about at a run's Redis, then removed.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.replies import Commit
from penstock.protocol.limits import MIB
from tests.deploy.prometheus.alert_scenes import (
    ENDLESS,
    Scene,
    going_on,
    launcher_stopped,
    seen,
    stopped,
    stranger,
    training,
    watched,
)
from tests.deploy.prometheus.prometheus_server import needs_prometheus
from tests.support.run.harness import Training, eventually, is_alive, launch
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import fragment
from tests.support.run.store_run import open_run
from tests.support.storage.small_disk import SizeLimit

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(1200)]

MEMORY: Final = 112 * MIB
SMALL: Final = (
    f"--set=broker.max_memory_bytes={MEMORY}",
    f"--set=broker.max_log_bytes={16 * MIB}",
    f"--set=broker.max_staged_bytes={4 * MIB}",
    "--set=broker.redis_wait_s=600",
    "--set=learner.stall_timeout_s=3000",
)

APPENDED: Final = "sum(increase(penstock_fragments_appended_total[5s]))"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """`penstock train` with one actor and a Redis of 96 MiB, whose absence everybody bears for long."""
    words = ("CartPole-v1", "--actors=1", *ENDLESS, *SMALL)
    with training(tmp_path_factory.mktemp("redis") / "run", *words) as running:
        yield running


@pytest.fixture(scope="module")
def scene(run: Training, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with seen(tmp_path_factory.mktemp("prometheus"), run) as scene:
        yield scene


@pytest.fixture
def client(run: Training) -> Iterator[Any]:
    url = json.loads((run.run_dir / "endpoints.json").read_text())["redis"]["address"]
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.mark.promise("fragment-book-accounts-raises")
def test_a_fragment_in_no_account_raises_an_alert(scene: Scene, client: Any) -> None:
    scene.clears("PenstockLedgerUnbalanced")
    client.hincrby(keys.STATE, "acked", 1)
    try:
        scene.fires("PenstockLedgerUnbalanced")
    finally:
        client.hincrby(keys.STATE, "acked", -1)
    scene.clears("PenstockLedgerUnbalanced")


def test_a_redis_filled_by_other_users_raises_an_alert(scene: Scene, client: Any) -> None:
    scene.clears("PenstockRedisMemory")
    names = [f"foreign:{number}" for number in range(MEMORY // MIB)]
    for name in names:
        if client.info("memory")["used_memory"] > 0.93 * MEMORY:
            break
        client.set(name, bytes(MIB))
    scene.fires("PenstockRedisMemory")
    client.unlink(*names)
    scene.clears("PenstockRedisMemory")


def test_an_append_only_file_that_cannot_be_written_or_rewritten_raises_an_alert(
    scene: Scene, run: Training, client: Any, tmp_path: Path
) -> None:
    scene.clears("PenstockRedisPersistence")
    disk = SizeLimit(tmp_path, lambda: run.pids()["redis"])
    disk.fill(1)
    try:
        scene.fires("PenstockRedisPersistence")
        with suppress(redis.ResponseError):  # some versions refuse, others begin and fail
            client.bgrewriteaof()
        scene.until_seen("penstock_redis_rewrite_failing == 1")
    finally:
        disk.free()
    scene.until_seen("penstock_redis_write_failing == 0")
    scene.fires("PenstockRedisPersistence")
    client.bgrewriteaof()
    scene.clears("PenstockRedisPersistence")


def test_a_redis_that_lost_seconds_without_a_learner_raises_an_alert(
    scene: Scene, run: Training, tmp_path: Path
) -> None:
    scene.clears("PenstockLogClosed", "PenstockExperienceLost")
    _copy_files(run.run_dir / "redis", tmp_path)
    run.until_steps(run.steps() - run.began_steps + 10_000)
    with ExitStack() as learner:
        with stopped(run, "actor-0"):
            scene.until_seen(f"{APPENDED} == 0")
            learner.enter_context(stopped(run, "learner"))
        scene.until_seen(f"{APPENDED} > 0")
        scene.until_seen(f"{APPENDED} == 0")
        with launcher_stopped(run):
            os.kill(pid := run.pids()["redis"], signal.SIGKILL)
            eventually(lambda: not is_alive(pid), "the end of redis-server")
            _copy_files(tmp_path, run.run_dir / "redis")
        scene.fires("PenstockLogClosed")
        with stopped(run, "actor-0"):
            learner.close()
            scene.until_seen('min(up{instance="learner"}) == 1 and max(penstock_log_closed) == 0')
    scene.fires("PenstockExperienceLost")
    scene.clears("PenstockLogClosed", "PenstockExperienceLost", "PenstockLedgerUnbalanced")


def _copy_files(source: Path, target: Path) -> None:
    for name in ("appendonly.aof", "appendonlydir"):
        if (source / name).is_dir():
            shutil.rmtree(target / name, ignore_errors=True)
            shutil.copytree(source / name, target / name)
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


def test_a_client_whose_fragments_break_the_schema_raises_an_alert(scene: Scene, run: Training) -> None:
    scene.clears("PenstockRefusals")
    with stranger(run) as actor:

        def offer() -> None:
            actor.send(fragment(actor.session))

        with going_on(offer):
            scene.fires("PenstockRefusals")
    scene.clears("PenstockRefusals")


def test_a_log_that_fills_up_raises_an_alert(tmp_path: Path, redis_url: str) -> None:
    learner = open_run(redis_url, max_log_bytes=8192, budget=10**6)
    with ExitStack() as stack:
        broker = launch(redis_url, tmp_path)
        stack.callback(broker.end)
        eventually(broker.is_ready, "the broker")
        scene = stack.enter_context(watched(tmp_path, broker=broker.endpoint))
        actor = stack.enter_context(SimulatedActor(broker.address, "actor-0"))
        actor.open()
        assert not scene.prometheus.firing() & {"PenstockLogNearCeiling", "PenstockLogFull"}

        def offer() -> None:
            actor.watch()
            actor.send_all_with_credit(at_most=1)

        with going_on(offer):
            scene.fires("PenstockLogNearCeiling", "PenstockLogFull")
        head = learner.read(0, 10**6, 0)[-1].number
        for name in ("first", "second"):
            learner.commit(Commit(checkpoint_id=name, manifest_sha256="aa", position=head, trim=head))
        scene.clears("PenstockLogNearCeiling", "PenstockLogFull")
