"""The folder of an injector: its files, its lock, and what they say of goals that were proposed before.

Order of the lines of one goal, each on the disk before anything else happens:

    proposed ─► injected ─► (carried out) ─► feedback ─► processed

A kill before "injected": nothing was done. Between "injected" and feedback: the outcome is unknown, so the
goal is booked as interrupted, and is never carried out again. Between feedback and "processed": the reward is
reported again, under the same request id, so that it counts once.
"""

import fcntl
import json
import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import Fatal
from penstock.runtime.output_file import sync_folder

# ---- The lines of the files: goals, their outcomes, vetoes, switches.

SOURCE: Final = "penstock"
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Id = Annotated[str, Field(min_length=1, max_length=128)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Injection(_Line):
    """A goal that was proposed. timestamp: Unix time in seconds.

    injected: it is carried out, or was. processed: its outcome is known, and what learns has been told.
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


INJECTIONS: Final = "goal_injections.jsonl"
FEEDBACK: Final = "rl_feedback.jsonl"
VETOES: Final = "goal_vetoes.jsonl"
SWITCHES: Final = "auto_switches.jsonl"
STOPPED: Final = "stopped.json"
_FILES: Final[dict[type, str]] = {
    Injection: INJECTIONS,
    Feedback: FEEDBACK,
    Veto: VETOES,
    Switch: SWITCHES,
}
Record = TypeVar("Record", Injection, Feedback, Veto, Switch)
GoalLine = TypeVar("GoalLine", Injection, Feedback, Veto)

# ---- Files of JSON lines that survive a kill at any moment: what was added is there, whole, or not at all.

_CHUNK: Final = 65_536


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Add a line, of several processes one at a time; it is on the disk when this returns.

    The beginning of a line that a kill has left there is cut. Raises OSError, and then nothing was added.
    """
    data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    is_new = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = _whole_bytes(file)
        os.ftruncate(file, end)
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, end)
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(file)
    if is_new:
        sync_folder(path.parent)


def _whole_bytes(file: int) -> int:
    """Return where the last whole line of a file ends."""
    end = os.fstat(file).st_size
    while end:
        begin = max(end - _CHUNK, 0)
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


_Numbered = tuple[int | None, dict[str, Any]]
"""Number of a line, from 1, where it is known, and its content."""


def read_lines(path: Path, most_bytes: int | None = None) -> Iterator[_Numbered]:
    """Yield the whole lines, oldest first; none without a file. most_bytes: of its end; None: all of it."""
    try:
        with path.open("rb") as file:
            begin = 0 if most_bytes is None else max(file.seek(0, os.SEEK_END) - most_bytes, 0)
            file.seek(max(begin - 1, 0))
            if begin and file.read(1) != b"\n":
                file.readline()
            for count, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    number = count if most_bytes is None else None
                    yield number, _parsed(path, number, line)
    except FileNotFoundError:
        return


def _parsed(path: Path, number: int | None, line: bytes) -> dict[str, Any]:
    which = "a line near the end" if number is None else f"line {number}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {which} is no JSON: {error}; move the file away") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: {which} is no JSON object; move the file away")
    return found


def records(kind: type[Record], folder: Path, most_bytes: int | None = None) -> Iterator[Record]:
    """Yield the lines of a folder's file; raises ConfigurationError that names file, line and field.

    most_bytes: how much of the end of the file is read; None: all.
    """
    name = _FILES[kind]
    for number, line in read_lines(folder / name, most_bytes):
        try:
            yield kind.model_validate(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            where = name if number is None else f"{name}: line {number}"
            raise ConfigurationError(
                f"{where}: {field}={str(first['input'])[:80]!r}: {first['msg'].lower()}; "
                "move the file away, or repair the line"
            ) from error


# ---- What was proposed, injected and learned in a folder.

_LOCK: Final = "injector.lock"
RECENT: Final = 250
"""Outcomes that fits and drift look at."""
VETO: Final = "veto"
"""What held back a goal that an operator forbade, as `held` in its metadata."""
INTERRUPTED: Final = "interrupted: the injector ended while the goal was carried out"


Told = tuple[Injection, bool]
"""A goal whose outcome is known, and whether it succeeded."""


class InjectionJournal:
    """What was proposed, injected and learned in one folder. One process holds it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (INJECTIONS, FEEDBACK):  # by the first the page finds an injector
            (folder / name).touch(0o600)
        sync_folder(folder)
        self.newest, self.outcomes = newest(Injection, folder), newest(Feedback, folder)
        self._told = told_of(self.newest, self.outcomes)
        injected = [one.timestamp for one in self.newest.values() if one.injected]
        self._days = Counter(map(_day, injected))
        self.last_injected_at = max(injected, default=0.0)
        """Unix time in seconds; 0 for never."""

    @classmethod
    @contextmanager
    def held(cls, folder: Path) -> Iterator["InjectionJournal"]:
        """Yield the journal of a folder, which is made, and which no other process holds meanwhile."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigurationError(f"--folder {folder}: {error.strerror}; name a folder") from error
        with (folder / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"--folder {folder}: another injector works in it; end that one or name another folder"
                ) from error
            yield cls(folder)

    def add(self, injection: Injection) -> None:
        add_line(self.folder / INJECTIONS, injection.model_dump())
        before = self.newest.get(injection.goal_id)
        if injection.injected and not (before and before.injected):
            self._days[_day(injection.timestamp)] += 1
            self.last_injected_at = max(self.last_injected_at, injection.timestamp)
        self.newest[injection.goal_id] = injection

    def add_outcome(self, feedback: Feedback) -> None:
        add_line(self.folder / FEEDBACK, feedback.model_dump())
        self.outcomes[feedback.goal_id] = feedback
        self._told += told_of({feedback.goal_id: self.newest[feedback.goal_id]}, self.outcomes)

    def interrupted(self) -> list[Injection]:
        return [one for one in self.newest.values() if one.injected and one.goal_id not in self.outcomes]

    def unreported(self) -> list[tuple[Injection, Feedback]]:
        """Return goals whose outcome is known here and not yet where it is learned from."""
        return [
            (one, self.outcomes[one.goal_id])
            for one in self.newest.values()
            if one.injected and not one.processed and one.goal_id in self.outcomes
        ]

    def told(self, since: float = 0.0) -> list[Told]:
        """Return the newest goals whose success is known, oldest first. since: Unix time in seconds."""
        return [(one, success) for one, success in self._told[-RECENT:] if one.timestamp >= since]

    def injected_on(self, at: float) -> int:
        return self._days[_day(at)]

    def is_vetoed(self, goal_id: str) -> bool:
        return any(one.goal_id == goal_id for one in records(Veto, self.folder))

    def stop(self, why: str, at: float) -> None:
        add_line(self.folder / STOPPED, {"why": why, "timestamp": at})

    def start_again(self, *, allowed: bool) -> float:
        """Return since when outcomes count for drift; raises Fatal where it had stopped and may not go on."""
        stopped = stopped_by(self.folder)
        if stopped is None:
            return float(_last_stop(self.folder).get("timestamp", 0.0))
        if not allowed:
            raise Fatal(f"injecting stopped: {stopped}; look with --explain, then start with --resume")
        now = time.time()
        add_line(self.folder / STOPPED, {"why": stopped, "timestamp": now, "resumed": True})
        return now


def newest(kind: type[GoalLine], folder: Path, most_bytes: int | None = None) -> dict[str, GoalLine]:
    """Return the newest line of every goal, in the order in which goals were first named."""
    return {record.goal_id: record for record in records(kind, folder, most_bytes)}


def stopped_by(folder: Path) -> str | None:
    """Return why an injector has stopped itself; None where it may go on."""
    last = _last_stop(folder)
    return None if not last or last.get("resumed") else str(last.get("why"))


def _last_stop(folder: Path) -> dict[str, Any]:
    return next((line for _, line in deque(read_lines(folder / STOPPED), 1)), {})


def told_of(newest: dict[str, Injection], outcomes: dict[str, Feedback]) -> list[Told]:
    """Return the goals whose success is known, in the order of `newest`."""
    return [
        (one, found.success)
        for one in newest.values()
        if (found := outcomes.get(one.goal_id)) and found.success is not None
    ]


class UnknownGoal(ConfigurationError):
    """A goal that was never proposed in a folder."""


class TooLate(Fatal):
    """A goal that is carried out already, or will not be in any case; the text says which."""


def veto(folder: Path, goal_id: str, by: str = "") -> None:
    """Forbid a goal, once; raises UnknownGoal, or TooLate for one that no veto can hold."""
    found = newest(Injection, folder).get(goal_id)
    if found is None:
        raise UnknownGoal(f"--veto {goal_id}: no such goal in {folder / INJECTIONS}; copy its goal_id")
    if found.injected:
        raise TooLate("the goal was carried out already: give the next ones more time with --veto-s")
    held = found.metadata.get("held")
    if held and held != VETO:
        raise TooLate(f"the goal is not carried out anyway: {held}")
    if not held:
        add_line(folder / VETOES, Veto(goal_id=goal_id, timestamp=time.time(), by=by).model_dump())


def _day(at: float) -> tuple[int, ...]:
    return tuple(time.localtime(at)[:3])


# ---- The switch of a folder: whether goals are carried out, changed while the injector goes on.


def switch(folder: Path, *, on: bool, by: str = "") -> None:
    """Switch the injector of a folder; raises ConfigurationError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"--folder {folder}: is no folder; name the one that `penstock inject` works in"
        )
    add_line(folder / SWITCHES, Switch(on=on, by=by, timestamp=time.time()).model_dump())


def last_switch(folder: Path) -> Switch | None:
    """Return how a folder was switched last; None where it never was."""
    return next(iter(deque(records(Switch, folder), 1)), None)


def is_on(folder: Path, *, default: bool) -> bool:
    """Return whether goals are carried out. default: what counts before the folder was ever switched."""
    last = last_switch(folder)
    return default if last is None else last.on


# ---- What an injector says of itself while it lives, for those who look at its folder: `pulse.json`.

PULSE: Final = "pulse.json"
_MOST_BYTES: Final = 65_536


class Beat(_Line):
    """The state at one interval. trouble: why nothing was proposed, "" where that went well."""

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


def write_beat(folder: Path, beat: Beat) -> None:
    """Write a beat in place of the one before; raises OSError."""
    made = folder / f"{PULSE}.tmp"
    made.write_text(beat.model_dump_json())
    made.replace(folder / PULSE)


def last_beat(folder: Path) -> Beat | None:
    """Return the newest beat of a folder; None where there is none that can be read."""
    try:
        with (folder / PULSE).open("rb") as file:
            return Beat.model_validate(json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError):
        return None


# ---- When a goal may be carried out: by the hour, by the day, by the operator's leave.

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_MINUTES: Final = 60


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Minutes of the local day, from `begin` to before `end`, also over midnight: nothing is injected."""

    text: str
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
        return cls(text, begin, end)

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


# ---- How likely a goal succeeds: a logistic fit of the last outcomes on the logit of π(a) (Platt 1999).

LAST: Final = 200
"""Outcomes that are fitted."""
_FEWEST: Final = 20
"""Outcomes below which the rate alone is told, drawn to one half."""
_RIDGE: Final = 1.0
_ROUNDS: Final = 25
_BINS: Final = 5
_LARGEST_LOGIT: Final = 8.0


@dataclass(frozen=True, slots=True)
class SuccessFit:
    """Probability of success = σ(offset + slope · logit π(a))."""

    offset: float
    slope: float

    def at(self, certainty: float) -> float:
        return 1 / (1 + math.exp(-(self.offset + self.slope * _logit(certainty))))


def fit_success(certainties: Sequence[float], successes: Sequence[bool]) -> SuccessFit:
    """Fit the last 200 outcomes; with fewer than 20 the slope is 0 and the rate that of Laplace."""
    seen = np.array([_logit(one) for one in certainties[-LAST:]], np.float64)
    well = np.array(successes[-LAST:], np.float64)
    rate = (well.sum() + 1) / (len(well) + 2)
    weights = np.array([math.log(rate / (1 - rate)), 0.0])
    if len(well) < _FEWEST:
        return SuccessFit(float(weights[0]), 0.0)
    # The likelihood with a ridge on the slope is maximised by Newton's method on both numbers.
    inputs, ridge = np.stack([np.ones_like(seen), seen], 1), np.diag([1e-3, _RIDGE])
    for _ in range(_ROUNDS):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        slope = inputs.T @ (well - chance) - ridge @ weights
        curve = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + ridge
        weights = weights + np.linalg.solve(curve, slope)
    return SuccessFit(float(weights[0]), float(weights[1]))


def reliability(told: Sequence[float], successes: Sequence[bool]) -> dict[str, float] | None:
    """Return how well probabilities that were told before fit the last 200 outcomes; None below 20.

    brier: mean squared error. gap: mean distance between probability and rate over five groups of equal size,
    from the least to the most likely. outcomes: how many were judged.
    """
    chance, well = np.array(told[-LAST:], np.float64), np.array(successes[-LAST:], np.float64)
    if len(well) < _FEWEST:
        return None
    groups = np.array_split(np.argsort(chance, kind="stable"), _BINS)
    gaps = [abs(chance[group].mean() - well[group].mean()) * len(group) for group in groups]
    return {
        "brier": float(((chance - well) ** 2).mean()),
        "gap": float(sum(gaps) / len(well)),
        "outcomes": len(well),
    }


def _logit(probability: float) -> float:
    if probability <= 0:
        return -_LARGEST_LOGIT
    if probability >= 1:
        return _LARGEST_LOGIT
    return min(max(math.log(probability / (1 - probability)), -_LARGEST_LOGIT), _LARGEST_LOGIT)
