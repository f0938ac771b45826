"""Replies get lost after the broker's append: every fragment is stored once and in order all the same."""

from pathlib import Path

import pytest

from tests.support.network.network_run import network_run
from tests.support.storage.redis_server import RedisServer

ACTORS = 8
LOSS = 0.3


@pytest.mark.parametrize("fragments", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_lost_replies_leave_every_fragment_once_and_in_order(
    redis_server: RedisServer, tmp_path: Path, fragments: int
) -> None:
    with network_run(redis_server, tmp_path) as run:
        run.proxy.set(lose_replies=LOSS)
        run.start(ACTORS, fragments // ACTORS)
        acked = run.finish()
        assert acked == len(run.reader.read) == fragments
        assert set(run.sessions().values()) == {1}
        assert run.proxy.lost_replies >= LOSS / 2 * run.proxy.replies
        assert run.metric("penstock_fragments_repeated_total") >= run.proxy.lost_replies / 10
