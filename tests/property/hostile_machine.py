"""What `store_machine` and `command_machine` leave out.

Resent, reordered and late messages, learners that are fenced off, and death.

Redis is killed with `kill -9` and comes back with all it had, or goes back to an older append-only file. A
learner's process dies and the next one begins from the newest checkpoint, while the old one, which does not
know yet, goes on trying to write. No session, epoch or version may ever come twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from penstock.broker.log import keys
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Commit, LogState
from penstock.broker.log.script import JUMP
from penstock.protocol.refusal import Reason, Refused
from tests.property.command_machine import CommandMachine
from tests.property.store_machine import BUDGET, MOST_ENTRIES
from tests.support.oracles import run_model
from tests.support.run import small_run
from tests.support.run.store_run import PACING, TTL_MS, item, reconnect
from tests.support.storage.redis_server import RedisServer

MOST_RESTARTS: Final = 2
"""Real deaths of Redis in one history; the others are played with DUMP and RESTORE, which is faster."""
MOST_AOF_BYTES: Final = 2**20
_LEARNER: Final = "learner"
_KEPT_OLD: Final = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    commit: Commit
    state: LogState
    memory: run_model.Memory


class HostileMachine(CommandMachine):
    """One run. `server_process` is set by the test."""

    server_process: RedisServer

    @initialize()
    def begin(self) -> None:
        """No process has died yet."""
        self.past: list[int] = []
        self.versions, self.epochs = {1}, {1}
        self.old: list[tuple[LearnerLog, int]] = []
        self.checkpoint: Checkpoint | None = None
        self.restarts = 0

    @initialize()
    def open_everything(self) -> None:
        """On a server whose append-only file does not grow with the number of histories."""
        files = self.server_process.folder.rglob("appendonly*")
        if sum(path.stat().st_size for path in files if path.is_file()) > MOST_AOF_BYTES:
            self.server_process.kill()
            self.server_process.forget()
            self.server_process.start()
        super().open_everything()

    def teardown(self) -> None:
        for log, _ in getattr(self, "old", ()):
            log.close()
        super().teardown()

    @rule(actor=st.sampled_from("abc"), is_reply_lost=st.booleans())
    def resend(self, actor: str, is_reply_lost: bool) -> None:
        _, acked = self.actors[actor]
        self.append(actor, acked, max(1, acked), 0, small_run.STEPS, is_reply_lost)

    @rule(actor=st.sampled_from("abc"), order=st.permutations(range(4)), is_reply_lost=st.booleans())
    def reorder(self, actor: str, order: list[int], is_reply_lost: bool) -> None:
        _, acked = self.actors[actor]
        for place in order:
            _, now = self.actors[actor]
            skip = acked + 1 + place - max(1, now + 1)
            if skip >= 0:
                self.append(actor, 0, 1, skip, small_run.STEPS, is_reply_lost)
            else:
                self.append(actor, -skip, 1, 0, small_run.STEPS, is_reply_lost)

    @rule(data=st.data(), sequence=st.integers(1, 3), acked=st.integers(0, 2))
    @precondition(lambda self: self.past)
    def late(self, data: st.DataObject, sequence: int, acked: int) -> None:
        """A message of a session that is over arrives."""
        session = data.draw(st.sampled_from(self.past))
        expected = self.server.append(session, acked, [(sequence, small_run.CHARGE)])
        reply = self.run(self.store.append(session, acked, [item(session, sequence)]))
        assert (reply.acked_through, reply.refusal and reply.refusal.reason) == expected
        self._follow_credit()

    def _open(self, actor: str, role: Any) -> None:
        if actor in self.actors and hasattr(self, "past"):
            self.past.append(self.actors[actor][0])
        super()._open(actor, role)

    @rule(pin=st.booleans())
    @precondition(lambda self: not self.server.closed)
    def publish(self, pin: bool) -> None:
        published = self.log.publish(
            b"weights", update=1, settled=self.memory.settled, scalars={}, pin=pin
        ).version
        assert published == self.server.weights.publish(pin)
        self._is_new(self.versions, published)
        self.server.settle(self.memory.settled)
        self._follow_credit()
        self.memory.version = published

    @rule()
    @precondition(lambda self: not self.server.closed)
    def publisher_dies(self) -> None:
        """A version is drawn and its bytes are stored; the pointer is never moved."""
        version = int(self.log._calls.fenced("allocate_version", 1)[1])
        self.log._calls.fenced("store_chunk", version, 0, b"half")
        assert version == self.server.weights.allocate()
        self._is_new(self.versions, version)

    @rule(data=st.data())
    @precondition(lambda self: not self.server.closed and self.server.weights.pins)
    def evaluated(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.server.weights.pins)))
        self.log.end_evaluation(version)
        self.server.weights.unpin(version)

    def _commit(self, commit: Commit) -> None:
        state, memory = self.log.snapshot(), replace_memory(self.memory)
        super()._commit(commit)
        super()._commit(commit)  # the reply was lost: repeating changes nothing
        self.checkpoint = Checkpoint(commit, replace(state, commits=(*state.commits, commit)), memory)
        self.checkpoint.memory.commits = [*memory.commits, commit.encode()]

    @rule()
    def somebody_else_wants_the_lease(self) -> None:
        other = LearnerLog.connect(self.url, wait_s=5.0)
        with pytest.raises(Refused, match="fenced"):
            other.acquire(small_run.RUN, "somebody else", TTL_MS)
        other.close()

    @rule(is_released=st.booleans())
    def take_over(self, is_released: bool) -> None:
        """The learner's process dies; the next one goes on from the newest checkpoint."""
        if is_released and self.server.fence(self.memory.epoch) is None:
            self.log.release()
        self.old = [*self.old, (self.log, self.memory.epoch)]
        if len(self.old) > _KEPT_OLD:
            self.old.pop(0)[0].close()
        self.log = LearnerLog.connect(self.url, wait_s=5.0)
        lease = self.log.acquire(small_run.RUN, _LEARNER, TTL_MS)
        self._is_new(self.epochs, lease.epoch)
        kept, was_closed = self.checkpoint, self.server.closed
        assert lease.closed == was_closed
        position = kept.commit.position if kept else 0
        self.memory = replace_memory(kept.memory) if kept else run_model.Memory(epoch=0, version=0)
        pacing = replace(PACING, budget=BUDGET, max_log_entries=MOST_ENTRIES)
        specification = small_run.specification().encode()
        self.log.start(specification, pacing, kept.state if kept else None, position)
        assert (lease.epoch > self.server.epoch + JUMP) == was_closed
        assert (self.log.epoch >= lease.epoch + JUMP) == was_closed
        run_model.take_over(self.server, self.memory, position, lease.epoch, self.log.epoch - lease.epoch)
        assert self.log.epoch == self.server.epoch
        self._follow_credit()
        if was_closed:
            self._is_new(self.epochs, self.log.epoch)
            self.saved = None

    @rule(data=st.data(), call=st.sampled_from(["settle", "commit", "publish", "observe", "renew"]))
    @precondition(lambda self: self.old)
    def a_fenced_learner_writes(self, data: st.DataObject, call: str) -> None:
        """It is told so, and nothing changes (the invariants look)."""
        log, epoch = data.draw(st.sampled_from(self.old))
        expected = self.server.fence(epoch)
        assert expected is not None
        if call == "renew" and expected is Reason.NOT_READY:
            assert log.renew().closed
            return
        commit = Commit(checkpoint_id="old", manifest_sha256="", position=1000, trim=1000)
        calls: dict[str, Callable[[], object]] = {
            "settle": lambda: log.settle(1000),
            "commit": lambda: log.commit(commit),
            "publish": lambda: log.publish(b"old", update=9, settled=1000, scalars={}),
            "observe": lambda: log.observe("old"),
            "renew": log.renew,
        }
        with pytest.raises(Refused, match=expected.label):
            calls[call]()

    @rule(is_opened=st.booleans())
    @precondition(lambda self: self.restarts < MOST_RESTARTS)
    def crash(self, is_opened: bool) -> None:
        """Kill -9: at `always` nothing is lost."""
        self.server_process.restart()
        self._came_back(is_opened)

    @rule(actor=st.sampled_from("abc"), count=st.integers(1, 3), is_read=st.booleans())
    @precondition(lambda self: self.restarts < MOST_RESTARTS and not self.server.closed)
    def rewind(self, actor: str, count: int, is_read: bool) -> None:
        """Kill -9, and the append-only file is an older one: what was acknowledged meanwhile is gone."""
        kept, copy = run_model.snapshot(self.server), self.server_process.save_aof()
        self.work(actor, count, is_reply_lost=False)
        self.publish(pin=False)
        if is_read:
            self.read()
        self.server_process.go_back(copy)
        self._go_back_to(kept)
        self._came_back(is_opened=True)
        self.work(actor, 1, is_reply_lost=False)

    def _came_back(self, is_opened: bool) -> None:
        self.restarts += 1
        self.run(reconnect(self.store))
        self.server.closed = True
        if is_opened:
            self.reopen()

    @rule()
    @precondition(lambda self: self.server.closed)
    def reopen(self) -> None:
        super().reopen()
        self._is_new(self.epochs, self.log.epoch)

    def _is_new(self, seen: set[int], number: int) -> None:
        assert number not in seen
        seen.add(number)

    @invariant()
    def weights_and_lease_agree(self) -> None:
        if not hasattr(self, "server"):
            return
        weights = self.server.weights
        assert {int(version) for version in self.raw.hkeys(keys.PUBLICATIONS)} == weights.kept
        assert {int(version) for version in self.raw.smembers(keys.PINS)} == weights.pins
        assert {key.decode() for key in self.raw.keys(keys.WEIGHTS + "*")} == {
            keys.weights(version, 0) for version in weights.kept | weights.staged
        }
        state = [int(value) for value in self.raw.hmget(keys.STATE, "epoch", "version", "version_counter")]
        assert state == [self.server.epoch, weights.newest, weights.counter]
        assert self.log.epoch == self.memory.epoch


def replace_memory(memory: run_model.Memory) -> run_model.Memory:
    return replace(memory, sequences=dict(memory.sequences), commits=list(memory.commits))
