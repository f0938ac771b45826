"""Random histories of lock-step rounds, with actors that come and go and a Redis that goes back in time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from penstock.broker.log import keys, replies
from penstock.broker.log.replies import Opened
from penstock.broker.log.script import JUMP
from penstock.broker.log.store import Store
from penstock.protocol.messages import Role, Watch
from tests.support.oracles import lock_step_model as model
from tests.support.run.small_run import CHARGE
from tests.support.run.store_run import BLOB, item, open_run
from tests.support.storage.redis_server import RedisServer, find_binaries

T = TypeVar("T")

ACTOR_COUNT = 2
SERVERS = len(find_binaries())


class LockStepMachine(RuleBasedStateMachine):
    """One lock-step run. `url` is set by the test."""

    url = ""

    @initialize()
    def open_everything(self) -> None:
        self.runner = asyncio.Runner()
        self.raw: Any = redis.Redis.from_url(self.url)
        self.raw.flushall()
        self.store = Store.connect(self.url)
        self.log = open_run(self.url, lock_step=True, actor_count=ACTOR_COUNT, budget=1000 * CHARGE)
        self.server = model.Server(ACTOR_COUNT, most_credit=1000)
        self.published = -1
        self.saved: tuple[dict[bytes, bytes], model.Server] | None = None
        self.actors: dict[str, tuple[int, int]] = {}  # name → session, acknowledged as the actor knows

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.run(self.store.aclose())
            self.runner.close()
            self.log.close()
            self.raw.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @rule(actor=st.sampled_from("abc"), role=st.sampled_from([Role.ROLLOUT, Role.ROLLOUT, Role.SERVER]))
    def open_session(self, actor: str, role: Role) -> None:
        opened = self.run(self.store.open_session(actor, role))
        assert isinstance(opened, Opened)
        assert opened.session == self.server.open(actor, role)
        self.actors[actor] = (opened.session, 0)

    @rule(
        data=st.data(),
        ahead=st.sampled_from([1, 1, 1, 1, 0, 2]),
        is_reply_lost=st.sampled_from([False, True]),
    )
    def append(self, data: st.DataObject, ahead: int, is_reply_lost: bool) -> None:
        """The next fragment, the last one again, or one too early."""
        actor = self._somebody(data)
        if actor is None:
            return
        session, acked = self.actors[actor]
        sequence = max(1, acked + ahead)
        expected = self.server.append(session, acked, sequence)
        reply = self.run(self.store.append(session, acked, [item(session, sequence)]))
        assert (reply.acked_through, reply.refusal and reply.refusal.reason) == expected
        if session in self.server.rows and not is_reply_lost:
            self.actors[actor] = (session, max(acked, reply.acked_through))

    @rule(data=st.data(), ahead=st.integers(0, 1))
    def watch(self, data: st.DataObject, ahead: int) -> None:
        actor = self._somebody(data)
        if actor is not None:
            session, acked = self.actors[actor]
            expected = self.server.watch(session, acked + ahead)
            watched = self.run(self.store.watch(Watch(session=session, begun_through=acked + ahead)))
            assert (watched.refusal and watched.refusal.reason) == expected

    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        """An actor drains, or is drained a second time."""
        actor = self._somebody(data)
        if actor is not None:
            session, _ = self.actors[actor]
            self.run(self.store.close_session(session))
            self.server.close(session)

    def _somebody(self, data: st.DataObject) -> str | None:
        return data.draw(st.sampled_from(sorted(self.actors))) if self.actors else None

    @rule(ahead=st.sampled_from([1, 1, 1, 0, 2]))
    def publish(self, ahead: int) -> None:
        """Weights for the next round, mostly; for one that is open already, or one further on."""
        round_ = max(0, self.server.round + ahead)
        self.log.publish(BLOB, update=round_, settled=0, scalars={}, round=round_)
        self.server.publish(round_)
        self.published = max(self.published, round_)

    @rule()
    def save(self) -> None:
        """This moment reaches the disk."""
        content = {key: self.raw.dump(key) for key in self.raw.keys("penstock:*")}
        self.saved = content, self.server.snapshot()

    @rule(is_back=st.booleans())
    def restart(self, is_back: bool) -> None:
        """Redis comes back, perhaps as it was at the saved moment, and is opened again."""
        if is_back and self.saved is not None:
            content, server = self.saved
            self.raw.flushall()
            for key, value in content.items():
                self.raw.restore(key, 0, value)
            self.server = server.snapshot()
        self.raw.hset(keys.STATE, "closed", 1)
        epoch = self.log.epoch
        self.log.reopen(self.log.snapshot())
        assert self.log.epoch >= epoch + JUMP
        self.server.reopen(self.published, self.log.epoch - epoch)
        self.saved = None

    @invariant()
    def rounds_agree(self) -> None:
        if not hasattr(self, "server"):
            return
        server = self.server
        state = [int(value or 0) for value in self.raw.hmget(keys.STATE, "round", "round_open")]
        assert state == [server.round, int(server.is_open)]
        assert {int(session) for session in self.raw.smembers(keys.ROSTER)} == server.roster
        for round_ in (server.round - 1, server.round, server.round + 1):
            assert self.log.round_complete(round_) == server.is_complete(round_)
        status = self.run(self.store.status())
        assert {row.session: (row.sequence, row.begin_through) for row in status.sessions} == {
            session: (row.sequence, row.begin_through) for session, row in server.rows.items()
        }
        entries = [replies.log_entry(*entry) for entry in self.raw.xrange(keys.LOG)]
        assert [(e.header.session, e.header.sequence) for e in entries if e.header] == server.log
        assert (status.acked, status.log_lost) == (server.acked, server.lost)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_every_history_of_rounds_agrees_with_the_model(redis_server: RedisServer, examples: int) -> None:
    class Machine(LockStepMachine):
        url = redis_server.url

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples // max(1, SERVERS),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
