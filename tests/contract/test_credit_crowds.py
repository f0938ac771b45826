"""Crowds of simulated actors on the real scripts, in virtual time: who gets credit, and what it costs others.

The time is set by hand, so every run of a crowd is the same.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.support.storage.credit_stand import Crowd, Outcome, Stand
from tests.support.storage.redis_server import RedisServer, find_binaries
from tests.support.storage.virtual_time import virtual_time

Play = Callable[[Crowd, int], Outcome]
LONGEST_MS = 1_500
"""The longest fragment of an actor that is not slow."""
LOCK_STEP_BOUND_MS = 40_000
"""One session timeout, and some renewals of the lease."""


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Let a crowd act for so many milliseconds on an empty server; a crowd that acted before acts no more."""
    server = RedisServer(find_binaries()[0], Path(tmp_path_factory.mktemp("redis")), "--appendonly", "no")
    server.start()
    played: dict[tuple[Crowd, int], Outcome] = {}
    with redis.Redis.from_url(server.url) as client, virtual_time():

        def one(crowd: Crowd, for_ms: int) -> Outcome:
            if (crowd, for_ms) not in played:
                client.flushall()
                stand = Stand(client, server.url, crowd)
                played[crowd, for_ms] = stand.run(for_ms)
                stand.close()
            return played[crowd, for_ms]

        yield one
    server.kill()


@pytest.mark.promise("actor-takes-part-within")
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize(("actors", "budget", "batch"), [(1, 2, 1), (12, 6, 3), (12, 24, 12)])
def test_every_actor_takes_part_from_the_first_round_on(
    play: Play, actors: int, budget: int, batch: int, weights_first: bool
) -> None:
    outcome = play(Crowd(actors=actors, budget=budget, batch=batch, weights_first=weights_first), 8_000)
    assert outcome.updates[0] <= LONGEST_MS
    assert outcome.rounds_until_all(range(actors)) <= math.ceil(actors / budget) + 1
    assert outcome.most_outstanding <= budget + 1


@pytest.mark.promise("actors-slow-hang-cost")
@pytest.mark.parametrize(("kind", "count"), [("slow", 2), ("slow", 10), ("hung", 10)])
def test_actors_lose_at_most_the_share_of_those_that_are_slow_or_hung(
    play: Play, kind: str, count: int
) -> None:
    actors, half_ms = 20, 40_000
    usual = play(Crowd(actors=actors, budget=10, batch=5), 2 * half_ms)
    crowd = Crowd(
        actors=actors, budget=10, batch=5, slow=count * (kind == "slow"), hung=count * (kind == "hung")
    )
    outcome = play(crowd, 2 * half_ms)
    share = usual.count(crowd.rest, half_ms, 2 * half_ms)
    # The arrivals of fragments are random: a twentieth.
    assert outcome.count(crowd.rest, half_ms, 2 * half_ms) >= 0.95 * share
    assert outcome.most_outstanding <= 11


@pytest.mark.promise("actors-slow-hang-cost")
def test_hung_first_comers_give_their_credit_to_those_that_come_later(play: Play) -> None:
    crowd = Crowd(actors=8, budget=4, batch=2, hung=4, hung_after=0)
    outcome = play(crowd, 90_000)
    assert outcome.rounds_until_all(crowd.rest) <= 3
    assert outcome.count(crowd.rest, 60_000, 90_000) >= 60


@pytest.mark.promise("lock-step-round-goes")
def test_a_lock_step_round_goes_on_without_a_member_that_is_silent(play: Play) -> None:
    crowd = Crowd(actors=4, budget=4, batch=4, hung=1, hung_after=2, lock_step=True)
    outcome = play(crowd, 60_000)
    gaps = [later - earlier for earlier, later in zip(outcome.updates, outcome.updates[1:], strict=False)]
    assert max(gaps) <= LOCK_STEP_BOUND_MS
    assert sum(gap > 2 * LONGEST_MS for gap in gaps) == 1
    assert sum(actor == 0 for _, actor in outcome.fragments) == 2
