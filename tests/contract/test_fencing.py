"""A learner that has lost its lease changes nothing, whichever script it reaches first.

Not only the first refusal counts: a process that was frozen between two calls wakes up in the second one.
"""

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Commit, Totals
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.protocol.refusal import Reason, Refused
from tests.support.network.proxy import Proxy
from tests.support.run.broker_process import eventually
from tests.support.run.small_run import CHARGE, RUN, specification
from tests.support.run.store_run import BLOB, PACING, TTL_MS, Actor, open_run

COMMIT = Commit(
    checkpoint_id="000000000001-00000009", manifest_sha256="0" * 64, position=2, trim=2, totals=Totals()
)
WRITES: dict[str, tuple[Any, ...]] = {
    "renew": (TTL_MS, 0),
    "allocate_version": (1,),
    "store_chunk": (3, 0, BLOB),
    "publish": (3, 9, "0" * 64, len(BLOB), 1, 2, "{}", "", 0, BLOB),
    "settle": (2,),
    "commit": (COMMIT.encode(), COMMIT.position, COMMIT.trim),
    "trim": (512,),
    "observe": ("{}",),
    "request_evaluation": (1,),
    "end_evaluation": (1,),
    "keep_versions": (5, 9, 1),
    "stage_version": (7, 1),
    "restore_version": (3, 9, "0" * 64, len(BLOB), 1),
}


@pytest.fixture
def old(redis_url: str) -> Iterator[LearnerLog]:
    """A learner whose lease went to the next process of the same name; two versions are published since."""
    log = open_run(redis_url)
    successor = LearnerLog.connect(redis_url, wait_s=5)
    successor.acquire(RUN, "learner", TTL_MS)
    successor.start(specification().encode(), PACING, position=0)
    successor.publish(BLOB, update=1, settled=0, scalars={})
    yield log
    successor.close()
    log.close()


def everything(url: str) -> dict[bytes, bytes]:
    """Every key and its content, serialised."""
    with redis.Redis.from_url(url) as client:
        names = [bytes(name) for name in client.scan_iter()]
        return {name: bytes(client.dump(name) or b"") for name in names}


async def append(url: str, count: int) -> None:
    """Put fragments into the log."""
    store = Store.connect(url)
    actor = Actor(store, "actor-0")
    await actor.open()
    assert (await actor.append(count)).refusal is None
    await store.aclose()


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_under_an_old_epoch_changes_nothing(redis_url: str, old: LearnerLog, name: str) -> None:
    await append(redis_url, 4)
    with redis.Redis.from_url(redis_url) as client:
        # What the scripts of a publication and of a trim would find half-done.
        client.hset(keys.STAGED_WEIGHTS, "3", "1")
        client.sadd(keys.KEPT, "7")
        client.hset(keys.STATE, "trim_floor", 1)
    before = everything(redis_url)
    with pytest.raises(Refused) as caught:
        old._calls.fenced(name, *WRITES[name])
    assert caught.value.refusal.reason is Reason.FENCED
    assert everything(redis_url) == before


def test_an_old_learner_opens_nothing_again(redis_url: str, old: LearnerLog) -> None:
    before = everything(redis_url)
    with pytest.raises(Refused) as caught:
        old.reopen(old.snapshot())
    assert caught.value.refusal.reason is Reason.FENCED
    assert everything(redis_url) == before


def test_release_by_an_old_learner_frees_no_lease(redis_url: str, old: LearnerLog) -> None:
    before = everything(redis_url)
    old.release()
    assert everything(redis_url) == before


async def test_a_call_whose_reply_is_lost_is_not_repeated_by_the_client(redis_url: str) -> None:
    log = open_run(redis_url, budget=64 * CHARGE)
    with Proxy(redis_url.replace("unix://", "unix:"), http2=False) as proxy:
        url = proxy.address.replace("unix:", "unix://")
        store = Store.connect(url)
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "evalsha": lambda: store.append(1, 0, []),
            "get": lambda: store.weights_chunk(0, 0),
        }
        for command, ask in asked.items():
            await ask()  # its connection is open
            before = calls(redis_url)
            with losing_one_reply(proxy), pytest.raises(StoreUnavailable):
                await ask()
            assert added(before, calls(redis_url), command, "eval") == [1, 0]
        await store.aclose()
        learner = LearnerLog.connect(url, wait_s=0)
        before = calls(redis_url)
        with losing_one_reply(proxy), pytest.raises(redis.ConnectionError):
            learner._calls.client.execute_command("STRLEN", keys.SPECIFICATION)
        assert added(before, calls(redis_url), "strlen", "eval") == [1, 0]
        learner.close()
    log.close()


@contextmanager
def losing_one_reply(proxy: Proxy) -> Iterator[None]:
    """The next reply is lost with its connection.

    The network is good again before anybody can call once more.
    """
    lost = proxy.lost_replies

    def heal() -> None:
        eventually(lambda: proxy.lost_replies > lost, "the loss of a reply")
        proxy.heal()

    proxy.set(lose_replies=1.0)
    healing = threading.Thread(target=heal)
    healing.start()
    yield
    healing.join()


def added(before: dict[str, int], after: dict[str, int], *names: str) -> list[int]:
    """How often each command was run in between."""
    return [after.get(name, 0) - before.get(name, 0) for name in names]


def calls(url: str) -> dict[str, int]:
    """How often the server ran each command, for clients and scripts together."""
    with redis.Redis.from_url(url) as client:
        stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(of["calls"]) for name, of in stats.items()}
