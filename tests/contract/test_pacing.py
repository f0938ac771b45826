import asyncio
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.script import SERVER_WAIT_MS
from penstock.broker.log.store import Store
from penstock.protocol.messages import Credit, Role, Watch
from penstock.protocol.refusal import Reason
from tests.support.run.small_run import CHARGE, specification
from tests.support.run.store_run import BLOB, PACING, Actor, Begin, new_actor
from tests.support.storage.credit_stand import Clock, Crowd, Outcome, Stand, virtual_time
from tests.support.storage.redis_server import RedisServer, find_binaries

TICK_MS = 1000


@pytest.fixture
def clock(redis_url: str) -> Iterator[Clock]:
    """The time of the scripts, set by hand."""
    with redis.Redis.from_url(redis_url) as client, virtual_time():
        yield Clock(client, 1_000_000)


class Learner:
    """Trains on everything it reads, `batch` fragments at a time; settles by publishing."""

    def __init__(self, log: LearnerLog, batch: int) -> None:
        self.log = log
        self.batch = batch
        self.position = 0
        self.updates = 0

    def work(self, *, skip: bool = False) -> int:
        """One pass over the log; fragments consumed. `skip`: updates fail and are settled only."""
        entries = self.log.read(self.position, 1000, 0)
        full = len(entries) // self.batch * self.batch
        for start in range(0, full, self.batch):
            self.position = entries[start + self.batch - 1].number
            if skip:
                self.log.settle(self.position)
            else:
                self.updates += 1
                self.log.publish(BLOB, update=self.updates, settled=self.position, scalars={})
        return full


async def _everybody(actors: list[Actor], learner: Learner, fragments: int) -> set[str]:
    """Act and learn until so many fragments are consumed; the names of those that acted."""
    acted: set[str] = set()
    for _ in range(20 * fragments):
        for actor in actors:
            await actor.watch()
            if await actor.work():
                acted.add(actor.name)
        await asyncio.to_thread(learner.work)
        assert learner.log.renew().outstanding <= 5 * CHARGE
        if learner.position >= fragments:
            return acted
    raise AssertionError(f"stuck at {learner.position} of {fragments}")


@pytest.mark.promise("many-actors-share-small")
async def test_64_actors_share_a_budget_of_four_fragments(store: Store, begin: Begin, clock: Clock) -> None:
    log = begin()
    actors = [Actor(store, f"actor-{index}") for index in range(64)]
    for actor in actors:
        await actor.open()
    learner = Learner(log, batch=2)
    random_actors = random.Random(clock.now_ms)
    while learner.position < 200:
        random_actors.shuffle(actors)
        await _everybody(actors, learner, learner.position + 4)


@pytest.mark.promise("credit-leak-returns-actor")
async def test_the_only_credit_is_taken_back_from_a_dead_actor(
    store: Store, begin: Begin, clock: Clock
) -> None:
    log = begin(budget=CHARGE, session_timeout_ms=2 * TICK_MS)
    dead, alive = await new_actor(store, "dead"), await new_actor(store, "alive")
    assert (dead.credit.begin_through, alive.credit.begin_through) == (1, 0)
    for _ in range(2):
        clock.advance(TICK_MS)
        assert (await alive.watch()).begin_through == 0
    clock.advance(1)
    assert (await alive.watch()).begin_through == 1
    assert await alive.work() == 1
    log.renew()
    assert [row.actor_id for row in (await store.status()).sessions] == ["alive"]


async def test_an_actor_that_waits_for_credit_keeps_its_session(
    store: Store, redis_url: str, begin: Begin
) -> None:
    log = begin(budget=CHARGE, session_timeout_ms=1000)
    waiting, _gone = await new_actor(store, "waiting"), await new_actor(store, "gone")
    with redis.Redis.from_url(redis_url) as client:
        for _ in range(5000):
            # Both were heard of for the last time long ago.
            client.zadd(keys.OPEN, dict.fromkeys(client.zrange(keys.OPEN, 0, -1), 0), xx=True)
            await waiting.watch()
            if log.renew().expired_sessions:
                break
            await asyncio.sleep(0.005)
    assert [row.actor_id for row in (await store.status()).sessions] == ["waiting"]


@pytest.mark.promise("credit-leak-returns-actor")
async def test_a_third_of_the_replies_is_lost(store: Store, begin: Begin) -> None:
    log = begin()
    actors = [Actor(store, f"actor-{index}") for index in range(6)]
    for actor in actors:
        await actor.open()
    learner, luck = Learner(log, batch=2), random.Random(1)
    for _ in range(400):
        for actor in actors:
            before = replace(actor)
            await actor.watch()
            if actor.credit.begin_through > actor.acked:
                await actor.append()
            if luck.random() < 0.3:  # the reply never came: the actor knows what it knew
                actor.acked, actor.credit = before.acked, before.credit
        await asyncio.to_thread(learner.work)
        if learner.position >= 200:
            break
    assert learner.position >= 200
    headers = [entry.header for entry in log.read(0, 10_000, 0)]
    for actor in actors:
        sequences = [header.sequence for header in headers if header and header.session == actor.session]
        assert sequences == list(range(1, len(sequences) + 1))


@pytest.mark.promise("credit-leak-returns-actor")
async def test_a_skipped_update_returns_its_budget(store: Store, begin: Begin) -> None:
    log = begin()
    actor = await new_actor(store)
    learner = Learner(log, batch=4)
    for round_ in range(5):
        await actor.watch()
        while actor.acked < 4 * (round_ + 1):
            assert (await actor.append()).refusal is None
        assert await asyncio.to_thread(learner.work, skip=True) == 4
    # It waited for a fifth fragment of its round and has credit for it.
    assert log.renew().outstanding == CHARGE


async def test_credit_is_one_fragment_at_a_time_and_more_while_no_session_waits(
    store: Store, begin: Begin
) -> None:
    log = begin(budget=6 * CHARGE, fragment_charge=CHARGE)
    first, second, third = (Actor(store, f"actor-{index}") for index in range(3))
    await first.open()
    assert first.credit.begin_through == 1
    assert (await first.watch()).begin_through == 2
    await first.append()
    assert first.credit.begin_through == 4
    await first.append(2)
    assert first.credit.begin_through == 6
    await second.open()
    await third.open()
    assert (second.credit.begin_through, third.credit.begin_through) == (0, 0)
    log.settle(1)
    assert [(await actor.watch()).begin_through for actor in (first, second, third)] == [6, 1, 0]
    await store.close_session(second.session)
    assert [(await actor.watch()).begin_through for actor in (first, third)] == [6, 1]
    assert log.renew().outstanding == 6 * CHARGE


@pytest.mark.promise("short-fragment-leaves-budget")
async def test_the_rest_of_a_short_fragments_credit_goes_to_waiting_sessions(
    store: Store, begin: Begin
) -> None:
    begin(budget=6 * CHARGE, fragment_charge=CHARGE)
    sender, waiting = Actor(store, "sender"), Actor(store, "waiting")
    await sender.open()
    await sender.watch()
    await sender.append()
    await sender.append(2)
    await waiting.open()
    assert (sender.credit.begin_through, waiting.credit.begin_through) == (6, 0)
    await sender.append(steps=1)
    assert [(await actor.watch()).begin_through for actor in (sender, waiting)] == [6, 1]


@pytest.mark.promise("credit-session-gives-back")
async def test_returned_credit_goes_to_a_waiting_session_at_once(store: Store, begin: Begin) -> None:
    log = begin(budget=2 * CHARGE)
    leaving, waiting = Actor(store, "leaving"), Actor(store, "waiting")
    await leaving.open()
    await leaving.watch()
    await waiting.open()
    assert (leaving.credit.begin_through, waiting.credit.begin_through) == (2, 0)
    for _ in range(2):  # saying it twice changes nothing
        await store.watch(Watch(session=leaving.session, begun_through=1, gives_back=True))
    assert (await waiting.watch()).begin_through == 1
    assert log.renew().outstanding == 2 * CHARGE
    assert (await leaving.append()).refusal is None
    late = await leaving.append()
    assert late.refusal is not None
    assert (late.refusal.reason, late.refusal.detail.partition(":")[0]) == (Reason.FULL, "pacing")
    log.settle(1)
    assert (await leaving.append()).refusal is None


async def test_credit_names_the_version_at_which_it_was_given(store: Store, begin: Begin) -> None:
    log = begin(budget=CHARGE)
    actor = await new_actor(store)
    await actor.append()
    log.publish(BLOB, update=1, settled=0, scalars={})
    assert await actor.watch() == Credit(1, 1, 0)
    log.publish(BLOB, update=2, settled=1, scalars={})
    assert await actor.watch() == Credit(2, 3, 0)


async def test_no_session_has_credit_before_the_first_weights(store: Store, begin: Begin) -> None:
    log = begin(publish=False)
    actor = await new_actor(store)
    assert actor.credit.begin_through == 0
    log.publish(BLOB, update=0, settled=0, scalars={})
    assert (await actor.watch()).begin_through == 2


@pytest.mark.promise("lock-step-round-continues")
async def test_a_round_continues_when_one_of_three_actors_stops(store: Store, begin: Begin) -> None:
    log = begin(lock_step=True, actor_count=3, session_timeout_ms=1000)
    actors = [Actor(store, f"actor-{index}") for index in range(3)]
    for actor in actors:
        await actor.open()
    for round_ in range(5):
        working = actors if round_ < 2 else actors[:2]
        for _ in range(1000):
            for actor in working:
                await actor.watch()
                await actor.work()
            if log.round_complete(round_):
                break
            await asyncio.sleep(0.005)
            log.renew()
        assert log.round_complete(round_)
        log.publish(BLOB, update=round_ + 1, settled=0, scalars={}, round=round_ + 1)
    assert [entry.round for entry in log.read(0, 100, 0)] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]


async def test_a_resumed_learner_finds_past_rounds_complete(store: Store, begin: Begin) -> None:
    log = begin(lock_step=True)
    actor = await new_actor(store)
    for round_ in range(3):
        await actor.watch()
        await actor.work()
        log.publish(BLOB, update=round_ + 1, settled=round_ + 1, scalars={}, round=round_ + 1)
    log.start(specification(lock_step=True).encode(), replace(PACING, lock_step=True), position=1)
    log.publish(BLOB, update=1, settled=1, scalars={})
    assert [entry.round for entry in log.read(1, 10, 0)] == [1, 2]
    assert log.round_complete(1)
    log.publish(BLOB, update=2, settled=2, scalars={}, round=2)
    assert log.round_complete(2)
    assert not log.round_complete(3)
    assert (await actor.watch()).round == 3


@pytest.mark.promise("policy-server-finds-room")
@pytest.mark.parametrize("batch", [1, 2])
async def test_a_policy_server_gets_credit_among_busy_rollout_workers(
    store: Store, begin: Begin, clock: Clock, batch: int
) -> None:
    log = begin()
    workers = [Actor(store, f"worker-{index}") for index in range(3)]
    server = Actor(store, "server", role=Role.SERVER)
    for actor in (*workers, server):
        await actor.open()
    learner = Learner(log, batch=batch)
    for _ in range(60):
        for worker in workers:
            await worker.watch()
            await worker.work()
        await server.append()
        clock.advance(50)
        await asyncio.to_thread(learner.work)
    trained = [worker.acked for worker in workers]
    assert server.acked >= 10
    assert min(trained) >= server.acked // 2


@pytest.mark.promise("policy-server-finds-room")
async def test_room_is_freed_when_a_server_does_not_return(store: Store, begin: Begin, clock: Clock) -> None:
    log = begin(budget=CHARGE)
    worker, server = await new_actor(store, "worker"), await new_actor(store, "server", role=Role.SERVER)
    assert (await server.append()).refusal is not None
    assert await worker.work() == 1
    await asyncio.to_thread(Learner(log, batch=1).work)
    assert (await worker.watch()).begin_through == 1
    for _ in range(SERVER_WAIT_MS // TICK_MS):
        clock.advance(TICK_MS)
        log.renew()
    assert (await worker.watch()).begin_through == 2


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
def test_every_actor_takes_part_from_the_first_round(
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
def test_later_sessions_get_the_credit_of_hung_earlier_ones(play: Play) -> None:
    crowd = Crowd(actors=8, budget=4, batch=2, hung=4, hung_after=0)
    outcome = play(crowd, 90_000)
    assert outcome.rounds_until_all(crowd.rest) <= 3
    assert outcome.count(crowd.rest, 60_000, 90_000) >= 60


@pytest.mark.promise("lock-step-round-goes")
def test_a_lock_step_round_continues_without_a_silent_member(play: Play) -> None:
    crowd = Crowd(actors=4, budget=4, batch=4, hung=1, hung_after=2, lock_step=True)
    outcome = play(crowd, 60_000)
    gaps = [later - earlier for earlier, later in zip(outcome.updates, outcome.updates[1:], strict=False)]
    assert max(gaps) <= LOCK_STEP_BOUND_MS
    assert sum(gap > 2 * LONGEST_MS for gap in gaps) == 1
    assert sum(actor == 0 for _, actor in outcome.fragments) == 2
