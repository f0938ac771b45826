"""A broker that outlives the run in its Redis serves the next one, or ends where it cannot read it."""

from pathlib import Path

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.script import LAYOUT
from tests.support.run.harness import eventually, launch, open_run
from tests.support.run.simulated_actor import SimulatedActor
from tests.support.run.small_run import fragment
from tests.support.storage.redis_server import RedisServer


@pytest.mark.promise("broker-remembers-run-ends")
def test_a_broker_serves_the_run_that_was_begun_anew_in_its_redis(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    first = open_run(redis_server.url, unroll_length=1)
    broker = launch(redis_server.url, tmp_path)
    eventually(broker.is_ready, "readiness")
    with (
        SimulatedActor(broker.address, "actor-0") as before,
        SimulatedActor(broker.address, "actor-1") as after,
    ):
        before.open()
        assert before.send(fragment(before.session)).refusal.detail.startswith("fragments[0]")
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
        second = open_run(redis_server.url)
        before.watch()  # the first call that meets another incarnation is to be asked again
        after.open()
        assert not after.send(fragment(after.session)).HasField("refusal")
    first.close()
    second.close()
    broker.end()


@pytest.mark.promise("brokers-learners-meet-run")
def test_a_run_of_another_layout_ends_the_broker(redis_server: RedisServer, tmp_path: Path) -> None:
    log = open_run(redis_server.url)
    broker = launch(redis_server.url, tmp_path)
    eventually(broker.is_ready, "readiness")
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(keys.STATE, "layout", LAYOUT + 1)
    code, last = broker.wait()
    assert code == 1
    assert f"has layout {LAYOUT + 1}, this release has layout {LAYOUT}" in last
    assert "of one release" in last
    log.close()
