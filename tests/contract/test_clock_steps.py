"""The clock of Redis's host steps, in both directions: leases, deadlines and rates go on as if it had not."""

from collections.abc import Iterator

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.script import MOST_STEP_MS
from penstock.broker.log.store import Store
from penstock.protocol.refusal import Refused
from tests.support.run.small_run import CHARGE, RUN
from tests.support.run.store_run import PACING, TTL_MS, Actor, open_run
from tests.support.storage.virtual_time import Clock, virtual_time

HOUR_MS = 3_600_000
SECOND_MS = 1_000
FORTH_AND_BACK = pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS], ids=["forth", "back"])


@pytest.fixture
def clock(redis_url: str) -> Iterator[Clock]:
    """The clock of Redis's host, set by hand."""
    with redis.Redis.from_url(redis_url) as client, virtual_time():
        yield Clock(client, 10 * HOUR_MS)


def pass_time(clock: Clock, log: LearnerLog, ms: int) -> int:
    """Let time pass, a second at a time, and a learner renew; the sessions that expired."""
    expired = 0
    for _ in range(ms // SECOND_MS):
        clock.advance(SECOND_MS)
        expired += log.renew().expired_sessions
    return expired


@pytest.mark.promise("clock-redis-s-host")
@FORTH_AND_BACK
async def test_sessions_live_on_and_end_when_they_are_silent(
    store: Store, redis_url: str, clock: Clock, step_ms: int
) -> None:
    log, actor = open_run(redis_url), Actor(store, "actor-0")
    timeout_ms = PACING.session_timeout_ms
    assert pass_time(clock, log, timeout_ms + SECOND_MS) == 0
    await actor.open()
    clock.advance(step_ms)
    assert log.renew().expired_sessions == 0
    assert pass_time(clock, log, timeout_ms - MOST_STEP_MS - SECOND_MS) == 0
    assert (await store.status()).sessions[0].idle_ms <= timeout_ms
    assert pass_time(clock, log, MOST_STEP_MS + 3 * SECOND_MS) == 1
    log.close()


@pytest.mark.promise("clock-redis-s-host")
@FORTH_AND_BACK
async def test_a_lease_is_held_and_ends_as_without_it(redis_url: str, clock: Clock, step_ms: int) -> None:
    log, other = open_run(redis_url), LearnerLog.connect(redis_url, wait_s=5.0)
    clock.advance(step_ms)
    waited_ms = 0
    while waited_ms <= 2 * TTL_MS:
        try:
            other.acquire(RUN, "elsewhere", TTL_MS)
            break
        except Refused:
            clock.advance(SECOND_MS)
            waited_ms += SECOND_MS
    assert TTL_MS - MOST_STEP_MS <= waited_ms <= TTL_MS + MOST_STEP_MS
    log.close()
    other.close()


@pytest.mark.promise("clock-redis-s-host")
@FORTH_AND_BACK
async def test_credit_stays_and_comes_back_as_without_it(
    store: Store, redis_url: str, clock: Clock, step_ms: int
) -> None:
    log = open_run(redis_url, budget=CHARGE)
    working, waiting = Actor(store, "working"), Actor(store, "waiting")
    pass_time(clock, log, PACING.session_timeout_ms + SECOND_MS)
    await working.open()
    for _ in range(6):
        clock.advance(SECOND_MS)
        assert (await working.append()).refusal is None
        log.settle(log.renew().head)
        await working.watch()
    await waiting.open()
    assert working.credit.begin_through > working.acked
    clock.advance(step_ms)
    log.renew()
    with redis.Redis.from_url(redis_url) as client:
        assert client.hget(keys.STATE, "taken_back") is None
        pass_time(clock, log, 10 * SECOND_MS)
        assert client.hget(keys.STATE, "taken_back") == b"1"
    await waiting.watch()
    assert waiting.credit.begin_through == 1
    log.close()
