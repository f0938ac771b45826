"""Histories of well-meaning actors, one learner and a Redis that goes back in time, against a model.

This is the state machine that Hypothesis drives; the model is `tests.support.oracles.run_model`.
`hostile_machine` adds what kills, fences and reorders.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from penstock.broker.log import keys, replies
from penstock.broker.log.replies import Appended, Commit, Opened
from penstock.broker.log.script import JUMP
from penstock.broker.log.store import Store
from penstock.protocol.messages import Role, Watch
from tests.support.oracles import run_model
from tests.support.run import small_run
from tests.support.run.store_run import item, open_run

T = TypeVar("T")

BUDGET = 12 * small_run.CHARGE
MOST_ENTRIES = 30


class StoreMachine(RuleBasedStateMachine):
    """One run. `url` is set by the test."""

    url = ""

    @initialize()
    def open_everything(self) -> None:
        self.runner = asyncio.Runner()
        self.raw: Any = redis.Redis.from_url(self.url)
        self.raw.flushall()
        self.store = Store.connect(self.url)
        self.log = open_run(self.url, budget=BUDGET, max_log_entries=MOST_ENTRIES)
        self.server = run_model.Server(BUDGET, small_run.CHARGE, MOST_ENTRIES)
        self.memory = run_model.Memory()
        self.checkpoints = 0
        self.sessions: set[int] = set()
        self.saved: tuple[dict[bytes, bytes], run_model.Server] | None = None
        self.actors: dict[str, tuple[int, int]] = {}  # name → session, acked_through as the actor knows
        for name, role in (("a", Role.ROLLOUT), ("b", Role.ROLLOUT), ("c", Role.SERVER)):
            self._open(name, role)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.run(self.store.aclose())
            self.runner.close()
            self.log.close()
            self.raw.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @rule(actor=st.sampled_from("abc"), role=st.sampled_from([Role.ROLLOUT, Role.ROLLOUT, Role.SERVER]))
    @precondition(lambda self: not self.server.closed)
    def open_session(self, actor: str, role: Role) -> None:
        self._open(actor, role)

    def _open(self, actor: str, role: Role) -> None:
        opened = self.run(self.store.open_session(actor, role))
        assert isinstance(opened, Opened)
        assert opened.session == self.server.open(actor, role)
        assert opened.session not in self.sessions
        self.sessions.add(opened.session)
        self._follow_credit()
        assert opened.credit.begin_through == self.server.rows[opened.session].begin_through
        self.actors[actor] = (opened.session, 0)

    @rule(
        actor=st.sampled_from("abc"),
        back=st.sampled_from([0, 0, 0, 1, 2]),
        count=st.integers(1, 4),
        skip=st.sampled_from([0, 0, 0, 0, 0, 1]),
        steps=st.sampled_from([small_run.STEPS, small_run.STEPS, 1]),
        is_reply_lost=st.booleans(),
    )
    def append(self, actor: str, back: int, count: int, skip: int, steps: int, is_reply_lost: bool) -> None:
        """Fragments in order, some again, some too early; the reply may be lost."""
        session, acked = self.actors[actor]
        first = max(1, acked + 1 - back) + skip
        items = [item(session, first + i, steps=steps) for i in range(count)]
        expected = self.server.append(session, acked, [(i.header.sequence, i.header.charge) for i in items])
        reply: Appended = self.run(self.store.append(session, acked, items))
        assert (reply.acked_through, reply.refusal and reply.refusal.reason) == expected
        self._follow_credit()
        if session in self.server.rows and not is_reply_lost:
            self.actors[actor] = (session, max(acked, reply.acked_through))

    @rule(
        actor=st.sampled_from("abc"),
        ahead=st.integers(0, 1),
        gives_back=st.sampled_from([False, False, False, True]),
    )
    def watch(self, actor: str, ahead: int, gives_back: bool = False) -> None:
        """Ask for credit, or give back what is not begun."""
        session, acked = self.actors[actor]
        expected = self.server.watch(session, acked + ahead)
        if gives_back and expected is None:
            self.server.give_back(session, acked + ahead)
        request = Watch(session=session, begun_through=acked + ahead, gives_back=gives_back)
        watched = self.run(self.store.watch(request))
        assert (watched.refusal and watched.refusal.reason) == expected
        self._follow_credit()
        if watched.news is not None and not gives_back:
            row = self.server.rows[session]
            assert row.credit or row.given_back or row.role is Role.SERVER or session in self._waiting()
        if watched.news is not None:
            assert watched.news.credit.begin_through == self.server.rows[session].begin_through

    @rule(actor=st.sampled_from("abc"))
    def close_session(self, actor: str) -> None:
        session, _ = self.actors[actor]
        self.run(self.store.close_session(session))
        self.server.rows.pop(session, None)
        self._follow_credit()

    def _waiting(self) -> set[int]:
        return {int(session) for session in self.raw.zrange(keys.WAITING, 0, -1)}

    def _follow_credit(self) -> None:
        """Let the model take the credit that was given; it says whether it may have been."""
        if self.server.closed:
            return
        told = {}
        for session in self.server.rows:
            values = self.raw.hmget(f"{keys.SESSION}{session}", "begin_through", "taken")
            told[session] = (int(values[0] or 0), int(values[1] or 0))
        self.server.take(told, self._waiting())

    @rule()
    def read(self) -> None:
        self.log.read(self.memory.number, 1000, 0)
        self.memory.read(self.server)

    @rule(back=st.integers(0, 3))
    @precondition(lambda self: not self.server.closed)
    def settle(self, back: int) -> None:
        self.read()
        position = max(0, self.memory.number - back)
        self.log.settle(position)
        self.server.settle(position)
        self._follow_credit()
        self.memory.settled = max(self.memory.settled, position)

    @rule(back=st.integers(0, 3))
    @precondition(lambda self: not self.server.closed)
    def commit(self, back: int) -> None:
        """Settle; a checkpoint at the settled position; what lies behind it goes."""
        self.settle(0)
        trim = max(0, self.memory.settled - back)
        self.checkpoints += 1
        commit = Commit(
            checkpoint_id=f"{self.checkpoints:08d}",
            manifest_sha256="",
            position=self.memory.settled,
            trim=trim,
        )
        self._commit(commit)

    def _commit(self, commit: Commit) -> None:
        self.log.commit(commit)
        text = commit.encode()
        if self.server.commits[-1:] != [text]:
            self.server.commits = [*self.server.commits, text][-run_model.KEPT_COMMITS :]
        known = [kept for kept in self.memory.commits if kept != text]
        self.memory.commits = [*known, text][-run_model.KEPT_COMMITS :]
        self.server.trim(commit.trim)
        self.memory.trim_floor = max(self.memory.trim_floor, self.server.trim_floor)

    @rule()
    @precondition(lambda self: not self.server.closed)
    def renew(self) -> None:
        self.memory.lost = max(self.memory.lost, self.log.renew().log_lost)
        self._follow_credit()

    @rule()
    @precondition(lambda self: not self.server.closed)
    def save(self) -> None:
        """This moment reaches the disk."""
        content = {key: self.raw.dump(key) for key in self.raw.keys("penstock:*")}
        self.saved = content, run_model.snapshot(self.server)

    @rule(is_back=st.booleans(), is_opened=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: not self.server.closed)
    def restart(self, is_back: bool, is_opened: bool) -> None:
        """Redis comes back, perhaps as it was at the saved moment; mostly it is opened at once."""
        if is_back and self.saved is not None:
            content, server = self.saved
            self.raw.flushall()
            for key, value in content.items():
                self.raw.restore(key, 0, value)
            self._go_back_to(server)
        self.raw.hset(keys.STATE, "closed", 1)
        self.server.closed = True
        if is_opened:
            self.reopen()

    def _go_back_to(self, server: run_model.Server) -> None:
        totals = self.server.totals
        self.server = run_model.snapshot(server)
        self.server.totals = totals | self.server.totals
        self.server.totals = {n: t for n, t in self.server.totals.items() if n <= self.server.number}

    @rule(
        actor=st.sampled_from("abc"),
        count=st.integers(1, 3),
        is_read=st.booleans(),
        is_reply_lost=st.booleans(),
    )
    @precondition(lambda self: not self.server.closed)
    def lose_appends(self, actor: str, count: int, is_read: bool, is_reply_lost: bool) -> None:
        """Fragments are acknowledged, perhaps read by the learner, and Redis goes back behind them."""
        self.save()
        for _ in range(count):
            self._append(actor, 1, is_reply_lost)
        if is_read:
            self.read()
        self.restart(is_back=True, is_opened=True)
        self._append(actor, 1, is_reply_lost)

    @rule(actor=st.sampled_from("abc"), count=st.integers(1, 6), is_reply_lost=st.booleans())
    @precondition(lambda self: not self.server.closed)
    def work(self, actor: str, count: int, is_reply_lost: bool) -> None:
        self._append(actor, count, is_reply_lost)

    def _append(self, actor: str, count: int, is_reply_lost: bool) -> None:
        self.append(actor, 0, count, 0, small_run.STEPS, is_reply_lost)

    @rule()
    @precondition(lambda self: self.server.closed)
    def reopen(self) -> None:
        epoch = self.log.epoch
        self.log.reopen(self.log.snapshot())
        assert self.log.epoch >= epoch + JUMP
        run_model.reopen(self.server, self.memory, self.log.epoch - epoch)
        self._follow_credit()
        self.saved = None

    @invariant()
    def books_and_log_agree(self) -> None:
        if not hasattr(self, "server"):
            return
        self.server.note_totals()
        status = self.run(self.store.status())
        assert (status.acked, status.log_lost, status.log_head) == (
            self.server.acked, self.server.lost, self.server.number,
        )  # fmt: skip
        assert status.acked == status.log_head + status.log_lost
        assert status.outstanding_steps == self.server.outstanding()
        assert {row.session: row.begin_through for row in status.sessions} == {
            session: row.begin_through for session, row in self.server.rows.items()
        }
        entries = [replies.log_entry(*entry) for entry in self.raw.xrange(keys.LOG)]
        assert {e.number: e.header and (e.header.session, e.header.sequence) for e in entries} == {
            number: entry and (entry.session, entry.sequence) for number, entry in self.server.log.items()
        }
        assert [e.number for e in entries] == sorted(self.server.log)
        kept = [number for number, entry in self.server.log.items() if entry is not None]
        assert len(self.raw.keys(keys.PAYLOAD + "*")) == len(kept)
        assert all(self.raw.ttl(keys.payload(number)) == -1 for number in kept)
        assert status.log_bytes == sum(e.held_bytes for e in entries if e.header is not None)
        assert not self.raw.keys(keys.STAGING + "*")
        assert [text.decode() for text in self.raw.lrange(keys.COMMITS, 0, -1)] == self.server.commits
