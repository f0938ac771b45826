"""Histories with commands of operators: pause, checkpoint, flush and restore beside `store_machine`.

Redis that goes back forgets commands with its newest seconds, and numbers that the learner has seen do not
come again. What an operator reads is a command as it was asked, with one answer at most.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from penstock.broker.log import keys
from penstock.broker.log.replies import Answer, Commit
from penstock.protocol.messages import Role, Watch
from penstock.protocol.refusal import Refused
from tests.property.store_machine import StoreMachine

REQUESTS = 24


class CommandMachine(StoreMachine):
    @rule(action=st.sampled_from(["pause", "resume"]))
    def control(self, action: Any) -> None:
        _, state = self.run(self.store.control(action))
        assert state is self.server.commands.control(action)
        self._follow_credit()

    @rule(
        request=st.integers(1, REQUESTS),
        action=st.sampled_from(["checkpoint", "flush", "flush", "restore"]),
        argument=st.sampled_from(["", "4", "good"]),
    )
    def ask(self, request: int, action: Any, argument: str) -> None:
        """A command, perhaps one that was asked before."""
        request_id = f"id-{request}"
        number, reason = self.server.commands.ask(request_id, action, argument)
        if reason is not None:
            with pytest.raises(Refused, match=reason.label):
                self.run(self.store.command(action, argument, request_id))
            return
        command, _ = self.run(self.store.command(action, argument, request_id))
        known = self.server.commands.noted[number]
        assert (command.number, command.action, command.argument) == (number, action, argument)
        assert (command.answer.encode() if command.answer else "") == known.answer

    @rule()
    def follow_commands(self) -> None:
        assert [command.number for command in self.log.commands()] == sorted(self.server.commands.noted)
        self.memory.command = max([self.memory.command, *self.server.commands.noted])

    @rule(data=st.data(), is_repeated=st.booleans())
    @precondition(lambda self: not self.server.closed and self.server.commands.pending())
    def refuse_command(self, data: st.DataObject, is_repeated: bool) -> None:
        """The learner says that it does not do a command."""
        answer = self._answer(data, refusal=1)
        for _ in range(1 + is_repeated):
            self.log.answer(answer)
        self.server.commands.answer(answer.number, answer.encode())

    @rule(data=st.data())
    @precondition(lambda self: not self.server.closed and self.server.commands.pending())
    def answer_by_commit(self, data: st.DataObject) -> None:
        """A checkpoint contains what was done."""
        answer = self._answer(data)
        self.settle(0)
        self.checkpoints += 1
        name = f"{self.checkpoints:08d}"
        answer = replace(answer, checkpoint_id=name)
        commit = Commit(
            checkpoint_id=name, manifest_sha256="", position=self.memory.settled, trim=0, answers=(answer,)
        )
        self.server.commands.answer(answer.number, answer.encode())
        self._commit(commit)

    def _answer(self, data: st.DataObject, refusal: int = 0) -> Answer:
        number = data.draw(st.sampled_from(self.server.commands.pending()))
        request_id = self.server.commands.noted[number].request_id
        return Answer(number=number, request_id=request_id, detail="", refusal=refusal)

    @rule(data=st.data(), force=st.booleans())
    @precondition(lambda self: not self.server.closed and self.server.commands.noted)
    def flush(self, data: st.DataObject, force: bool) -> None:
        """The learner asks policy servers for what they have cut, and decides once what a flush takes."""
        number = data.draw(st.sampled_from(sorted(self.server.commands.noted)))
        waiting = sum(row.role is Role.SERVER and row.flushed < number for row in self.server.rows.values())
        if force or not waiting:
            self.server.commands.decide(number, self.server.number)
        through = self.server.commands.noted[number].through
        assert self.log.flush(number, force=force) == (waiting, through)

    @rule(actor=st.sampled_from("abc"))
    def hand_over(self, actor: str) -> None:
        """An actor says that all it had cut for the newest flush is acknowledged."""
        session, acked = self.actors[actor]
        flushed = self.server.commands.newest
        expected = self.server.watch(session, acked, flushed)
        watched = self.run(self.store.watch(Watch(session=session, begun_through=acked, flushed=flushed)))
        assert (watched.refusal and watched.refusal.reason) == expected
        self._follow_credit()

    @invariant()
    def commands_agree(self) -> None:
        if not hasattr(self, "server"):
            return
        found = {}
        for number in self.server.commands.noted:
            row = self.raw.hmget(f"{keys.COMMAND}{number}", "id", "action", "argument", "through", "answer")
            found[number] = tuple((value or b"").decode() for value in row)
        assert len(self.raw.keys(keys.COMMAND + "*")) == len(found)
        assert found == {
            number: (
                *(one.request_id, one.action, one.argument),
                *("" if one.through is None else str(one.through), one.answer),
            )
            for number, one in self.server.commands.noted.items()
        }
