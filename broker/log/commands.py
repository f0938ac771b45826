"""Commands of operators that the learner answers, as they are kept in Redis.

    broker: command ─► [pending] ─► learner follows it ─► answered: refused at once, done with a commit

A request id that the caller draws names a command: asked again, it is the same command with its answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

CommandAction = Literal["checkpoint", "flush", "restore"]


class CommandRefusal(IntEnum):
    """Why a command was not done; same numbers as `penstock.v1.CommandRefusal`."""

    UNSUPPORTED = 1
    TOO_FEW_STEPS = 2
    NAME = 3
    MISMATCH = 4
    LIMIT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tells what became of a command.

    refusal: why it was not done; 0: done. detail: the same in words. checkpoint_id: contains what was done.
    version: under which restored weights were published. steps: of a flush, taken or pending.
    """

    number: int
    request_id: str
    detail: str
    refusal: int = 0
    checkpoint_id: str = ""
    version: int = 0
    steps: int = 0

    def encode(self) -> str:
        """Return the answer as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Answer":
        """Return the answer of a decoded JSON object."""
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as Redis keeps it.

    argument: name of a checkpoint, "" for none; of a flush the fewest steps, in decimal.
    through: newest log entry that a flush takes; None: not decided yet. answer: None while it is pending.
    """

    number: int
    request_id: str
    action: CommandAction
    argument: str
    through: int | None = None
    answer: Answer | None = None

    @classmethod
    def from_reply(cls, reply: Sequence[Any]) -> "Command":
        """Convert a command of a script's reply: number, request id, action, argument, through, answer."""
        number, request_id, action, argument, through, answer = reply
        return cls(
            number=int(number),
            request_id=request_id.decode(),
            action=action.decode(),
            argument=argument.decode(),
            through=int(through) if through else None,
            answer=Answer.from_json(json.loads(answer)) if answer else None,
        )
