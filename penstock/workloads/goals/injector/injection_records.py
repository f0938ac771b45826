"""The lines of an injector's files: goals, their outcomes, vetoes, switches; and its own status.

injected: it is carried out, or was. processed: its outcome is known, and what learns has been told.
"""

import json
import re
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError

SOURCE: Final = "penstock"
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Id = Annotated[str, Field(min_length=1, max_length=128)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


Record = TypeVar("Record", bound=_Line)


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


def read_record(kind: type[Record], file: str, number: int | None, line: dict[str, Any]) -> Record:
    """Return a line as a record. number: of the line, None where it is not known."""
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


# ---- What an injector says of itself while it lives, for those who look at its folder: `pulse.json`.

PULSE: Final = "pulse.json"
_LEAST_S: Final = 1.0
_MOST_BYTES: Final = 65_536


class Beat(BaseModel):
    """The state at one interval. trouble: why nothing was proposed, "" where that went well."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    at: float
    auto: bool
    trouble: str
    version: int
    threshold: float
    explore: float
    interval_s: float
    daily_limit: int
    veto_s: float
    quiet: list[str]
    ended: bool = False


class Pulse:
    """Writes the beats of one injector."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / PULSE
        self._next_s = 0.0

    def beat(self, beat: Beat) -> None:
        """Write a beat, unless one of the same second was; the last one is always written. Raises OSError."""
        if time.monotonic() < self._next_s and not beat.ended:
            return
        self._next_s = time.monotonic() + _LEAST_S
        made = self._file.with_suffix(".tmp")
        made.write_text(beat.model_dump_json())
        made.replace(self._file)


def last_beat(folder: Path) -> Beat | None:
    """Return the newest beat of a folder; None where there is none that can be read."""
    try:
        with (folder / PULSE).open("rb") as file:
            content: Any = json.loads(file.read(_MOST_BYTES))
        return Beat.model_validate(content)
    except (OSError, ValueError, ValidationError):
        return None


# ---- When a goal may be carried out: by the hour, by the day, by the operator's leave.

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_MINUTES: Final = 60


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Minutes of the local day, also over midnight, in which nothing is injected."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "QuietHours":
        """Return the hours of HH:MM-HH:MM; raises ValueError that says how they are written."""
        found = _HOURS.fullmatch(text)
        if found is None:
            raise ValueError(f"quiet hours {text!r}: write HH:MM-HH:MM, such as 22:00-06:30")
        first, second, third, fourth = map(int, found.groups())
        begin, end = first * _MINUTES + second, third * _MINUTES + fourth
        if begin == end:
            raise ValueError(f"quiet hours {text!r}: begin and end are the same; leave them out for none")
        return cls(begin, end)

    def __str__(self) -> str:
        begin, end = (divmod(one, _MINUTES) for one in (self.begin, self.end))
        return f"{begin[0]:02}:{begin[1]:02}-{end[0]:02}:{end[1]:02}"

    def hold(self, at: float) -> bool:
        local = time.localtime(at)
        minute = local.tm_hour * _MINUTES + local.tm_min
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionRules:
    """What holds whatever the policy draws. interval_s: between two goals, at least."""

    interval_s: float = 30.0
    daily_limit: int = 1000
    quiet: tuple[QuietHours, ...] = ()
    veto_s: float = 0.0

    def forbids(self, at: float, injected_today: int, *, auto: bool) -> str:
        """Return why nothing may be carried out at a Unix time; "" where it may."""
        if not auto:
            return "auto is off"
        if any(hours.hold(at) for hours in self.quiet):
            return "quiet hours"
        if injected_today >= self.daily_limit:
            return "daily limit"
        return ""
