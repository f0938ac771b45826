"""The commands that were done, as checkpoints remember them: none is done twice, and none is forgotten."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from penstock.broker.log.commands import Answer, Command

_REMEMBERED: Final = 16
"""Answers by request id: as many as may wait, so that one asked again after Redis forgot it is known."""


@dataclass(slots=True)
class CommandRecord:
    """Used by the loop's thread. newest: number of the newest command that was done."""

    newest: int = 0
    _answers: dict[str, Answer] = field(default_factory=dict)
    _uncommitted: dict[str, Answer] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], checkpoint_id: str) -> "CommandRecord":
        """Return the record of a checkpoint; state: what `state` returned, {} for none."""
        found = [Answer.from_json(value) for value in state.get("answers", ())]
        answers = {one.request_id: _within(one, checkpoint_id) for one in found}
        return cls(int(state.get("newest", 0)), answers)

    def state(self) -> dict[str, Any]:
        """Return a JSON object for a checkpoint."""
        return {"newest": self.newest, "answers": [asdict(answer) for answer in self._answers.values()]}

    def is_wanted(self, command: Command) -> bool:
        """Return whether a command is still to be followed.

        One that was done is done again where the checkpoint that contains it was lost.
        """
        if command.request_id in self._answers:
            return False
        answer = command.answer
        return answer is None or (not answer.refusal and command.number > self.newest)

    def known(self, command: Command) -> Answer | None:
        """Return the answer of a command that was done and that Redis holds as pending, else None.

        Redis has lost the answer, or the command too, and its caller has asked again.
        """
        answer = self._answers.get(command.request_id)
        if answer is None or command.answer is not None or command.request_id in self._uncommitted:
            return None
        return replace(answer, number=command.number)

    def note_done(self, answer: Answer) -> None:
        """Note what the next checkpoint will contain."""
        self.newest = max(self.newest, answer.number)
        self._answers[answer.request_id] = self._uncommitted[answer.request_id] = answer
        while len(self._answers) > _REMEMBERED:
            del self._answers[next(iter(self._answers))]

    def uncommitted(self, checkpoint_id: str) -> tuple[Answer, ...]:
        """Return what the checkpoint of that id contains first."""
        return tuple(_within(answer, checkpoint_id) for answer in self._uncommitted.values())

    def committed(self, checkpoint_id: str) -> None:
        """Note that the checkpoint counts."""
        for request_id, answer in self._uncommitted.items():
            self._answers[request_id] = _within(answer, checkpoint_id)
        self._uncommitted.clear()


def _within(answer: Answer, checkpoint_id: str) -> Answer:
    return answer if answer.checkpoint_id else replace(answer, checkpoint_id=checkpoint_id)
