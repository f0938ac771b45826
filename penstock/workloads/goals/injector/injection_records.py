"""The lines of an injector's files.

`goal_injections.jsonl`  a goal that was proposed; the newest line of a `goal_id` says how far it is
`rl_feedback.jsonl`      what became of a goal that was injected; one line for each
`goal_vetoes.jsonl`      goals that an operator forbids
`auto_switches.jsonl`    when an operator has switched carrying out on or off

injected: it is carried out, or was. processed: its outcome is known, and what learns has been told.
"""

from hashlib import sha256
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError

SOURCE: Final = "penstock"
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Id = Annotated[str, Field(min_length=1, max_length=128)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Injection(_Line):
    """A goal that was proposed. timestamp: Unix time in seconds.

    confidence: π(a), how certain the policy is of its choice. priority: how likely the goal succeeds.
    expected_reward: the critic's value. metadata: episode, step, and what held the goal back ("held").
    """

    goal_id: _Id
    goal: _Id
    source: str = SOURCE
    timestamp: _Real
    reasoning: str
    priority: _Share
    confidence: _Share
    expected_reward: _Real | None
    metadata: dict[str, Any]
    version: int
    injected: bool
    processed: bool


class Feedback(_Line):
    """What became of a goal. success: None where it was interrupted, so that it is unknown."""

    goal_id: _Id
    goal: _Id
    success: bool | None
    execution_time_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    output: str
    error: str
    reward: _Real | None
    timestamp: _Real


class Veto(_Line):
    """A goal that the operator forbids. by: who it was, as the gateway's audit names them."""

    goal_id: _Id
    timestamp: _Real
    by: str = ""


class Switch(_Line):
    """Carrying out is switched on or off. by: as that of a veto."""

    on: bool
    timestamp: _Real
    by: str = ""


def goal_id(episode: str, step: int) -> str:
    """Return the name of the goal of a step: the same whenever the same step is asked for."""
    return sha256(f"{episode}/{step}".encode()).hexdigest()[:32]


def read_record(kind: type[_Line], file: str, number: int | None, line: dict[str, Any]) -> Any:
    """Return a line as a record of a kind; raises ConfigurationError that names file, line and field.

    number: of the line, None where it is not known.
    """
    try:
        return kind.model_validate(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        where = file if number is None else f"{file}: line {number}"
        raise ConfigurationError(
            f"{where}: {field}={str(first['input'])[:80]!r}: {first['msg'].lower()}; "
            "move the file away, or repair the line"
        ) from error
