"""Large weights over one slow line: each actor's version rises, however often new ones are offered."""

import threading
import time
from pathlib import Path

import pytest

from penstock.broker.log.script import MOST_FETCHED
from penstock.protocol.limits import MIB
from tests.support.network.slow_line import LINE_BYTES_PER_S, SlowLineRun, slow_line_run
from tests.support.run.harness import eventually
from tests.support.storage.redis_server import RedisServer

SHARE = 1.5
"""Of what the line needs to carry one version to each actor."""


def assert_all_rise(run: SlowLineRun) -> None:
    """No actor waits for longer; no more versions are held than may be."""
    fair = run.size * len(run.actors)
    waits = [actor.longest() for actor in run.actors]
    print(
        f"{run.size / MIB:.1f} MiB, {len(run.actors)} actors, {run.publisher.count} publications: rises "
        f"{[len(actor.rises) for actor in run.actors]}, longest wait "
        f"{max(seconds for seconds, _ in waits):.1f} s and {max(size for _, size in waits) / fair:.2f} of "
        f"{fair / LINE_BYTES_PER_S:.1f} s, versions {run.most_versions}, Redis "
        f"{run.most_redis_bytes / MIB:.0f} MiB, broker {run.most_broker_bytes / MIB:.0f} MiB"
    )
    assert max(size for _, size in waits) <= SHARE * fair
    assert run.most_versions <= MOST_FETCHED + 2


@pytest.mark.promise("line-20-mb-s")
@pytest.mark.parametrize("fetch_wait_s", [0.0, 1000.0])
def test_each_actor_gets_newer_weights_over_a_slow_line(
    redis_server: RedisServer, tmp_path: Path, fetch_wait_s: float
) -> None:
    with slow_line_run(redis_server, tmp_path, mib=2.5, actors=4, fetch_wait_s=fetch_wait_s) as run:
        eventually(lambda: run.rises() >= 6, "six newer versions at each actor", 120.0)
        assert_all_rise(run)
        assert run.most_versions <= 2 or not fetch_wait_s


@pytest.mark.promise("line-20-mb-s")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mib", [7, 25, 100])
def test_weights_of_any_size_arrive_for_minutes(
    redis_server: RedisServer, tmp_path: Path, mib: float
) -> None:
    with slow_line_run(redis_server, tmp_path, mib=mib, actors=8, fetch_wait_s=1.0) as run:
        ends_s = time.monotonic() + 200.0
        while time.monotonic() < ends_s:
            run.check()
            threading.Event().wait(1.0)
        assert_all_rise(run)
