"""What a broker says of a run and of its commands, as frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class CommandState(Enum):
    """How far the learner is with a command."""

    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"


class CommandRefusal(Enum):
    """Why a command was not done."""

    UNSUPPORTED = "unsupported"
    TOO_FEW_STEPS = "too_few_steps"
    NAME = "name"
    MISMATCH = "mismatch"
    LIMIT = "limit"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReport:
    """A command as it stands.

    refusal: None unless it was refused. detail: the answer in words. version: of a restore, under which the
    weights were published. steps: of a flush, those of its batch, or those that were pending.
    """

    state: CommandState
    refusal: CommandRefusal | None
    detail: str
    version: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as its broker sees it.

    run: its name; "" before a learner has taken it. version, update: of the newest publication. learner: what
    the learner last said of itself.
    """

    run: str
    version: int
    update: int
    learner: Mapping[str, Any]
