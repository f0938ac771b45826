"""The folder of an injector: its files, its lock, and what they hold of earlier goals.

Order of the lines of one goal, each on the disk before the next action:

    proposed ─► injected ─► (carried out) ─► feedback ─► processed

A kill before "injected": nothing was done. Between "injected" and feedback: the outcome is unknown, so the
goal is recorded as interrupted, and is never carried out again. Between feedback and "processed": the reward
is sent again, under the same request id, so that it counts once.
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
from penstock.runtime.output_file import replace_file, sync_folder
from penstock.workloads.plugin.logistic import fit_logistic

# ---- The lines of the files: goals, their outcomes, vetoes, switches.

SOURCE: Final = "penstock"
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Id = Annotated[str, Field(min_length=1, max_length=128)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Injection(_Line):
    """A goal that was proposed. timestamp: Unix time in seconds.

    injected: it is carried out, or was. processed: nothing more is done for it: its reward
    was sent or refused, or it was interrupted.
    confidence: π(a), how certain the policy is of its choice. priority: probability that the goal succeeds.
    expected_reward: the critic's value. metadata: episode, step, and why the goal was held back ("held").
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
    """The outcome of a goal. success: None where it is unknown, since the goal was interrupted."""

    goal_id: _Id
    goal: _Id
    success: bool | None
    execution_time_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    output: str
    error: str
    reward: _Real | None
    timestamp: _Real


class Veto(_Line):
    """A goal that an operator forbids. by: the operator, as the gateway's audit names them."""

    goal_id: _Id
    timestamp: _Real
    by: str = ""


class Switch(_Line):
    """Carrying goals out was switched on or off. by: the operator, as in `Veto`."""

    on: bool
    timestamp: _Real
    by: str = ""


class Stop(_Line):
    """The injector has stopped itself, or an operator let it continue (`resumed`). why: the reason."""

    why: str
    timestamp: _Real = 0.0
    resumed: bool = False


def goal_id(episode: str, step: int) -> str:
    """Return the name of the goal of a step, which is the same whenever that step is repeated."""
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
    Stop: STOPPED,
}
Record = TypeVar("Record", Injection, Feedback, Veto, Switch, Stop)
GoalLine = TypeVar("GoalLine", Injection, Feedback, Veto)

# ---- Files of JSON lines that survive a kill at any moment: a line that is added is whole or absent.

_CHUNK: Final = 65_536


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Add a line, one process at a time; it is on the disk when this returns.

    The beginning of a line that a kill has left is cut off. After an OSError nothing was added.
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


_Located = tuple[str, dict[str, Any]]
"""Where a line stands, in words, and its content."""


def read_lines(path: Path, most_bytes: int | None = None) -> Iterator[_Located]:
    """Yield the whole lines, oldest first; none without a file. most_bytes: of its end; None: all of it."""
    try:
        with path.open("rb") as file:
            begin = 0 if most_bytes is None else max(file.seek(0, os.SEEK_END) - most_bytes, 0)
            file.seek(max(begin - 1, 0))
            if begin and file.read(1) != b"\n":
                file.readline()
            for count, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    where = f"line {count}" if most_bytes is None else "a line near the end"
                    yield where, _parsed(f"{path}: {where}", line)
    except FileNotFoundError:
        return


def _parsed(where: str, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is no JSON: {error}; move the file away") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{where} is no JSON object; move the file away")
    return found


def records(kind: type[Record], folder: Path, most_bytes: int | None = None) -> Iterator[Record]:
    """Yield the lines of a folder's file; raises ConfigurationError that names file, line and field.

    most_bytes: how much of the end of the file is read; None: all.
    """
    name = _FILES[kind]
    for where, line in read_lines(folder / name, most_bytes):
        try:
            yield kind.model_validate(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(
                f"{name}: {where}: {field}={str(first['input'])[:80]!r}: {first['msg'].lower()}; "
                "move the file away, or repair the line"
            ) from error


def _add(folder: Path, record: _Line) -> None:
    add_line(folder / _FILES[type(record)], record.model_dump())


# ---- What was proposed, injected and learned in a folder.

_LOCK: Final = "injector.lock"
RECENT: Final = 250
"""Outcomes that fits and drift look at."""
VETO: Final = "veto"
"""`held` in the metadata of a goal that an operator forbade."""
INTERRUPTED: Final = "interrupted: the injector ended while the goal was carried out"

KnownOutcome = tuple[Injection, bool]
"""A goal whose outcome is known, and whether it succeeded."""


class InjectionJournal:
    """What was proposed, injected and learned in one folder. One process holds it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (INJECTIONS, FEEDBACK):  # the page finds an injector by the first
            (folder / name).touch(0o600)
        sync_folder(folder)
        self.newest, self.outcomes = newest(Injection, folder), newest(Feedback, folder)
        self._known = known_outcomes(self.newest, self.outcomes)
        injected = [one.timestamp for one in self.newest.values() if one.injected]
        self._days = Counter(map(_day, injected))
        self.last_injected_at = max(injected, default=0.0)
        """Unix time in seconds; 0 for never."""

    @classmethod
    @contextmanager
    def held(cls, folder: Path) -> Iterator["InjectionJournal"]:
        """Yield the journal of a folder, which is created and held by this process alone."""
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
        _add(self.folder, injection)
        before = self.newest.get(injection.goal_id)
        if injection.injected and not (before and before.injected):
            self._days[_day(injection.timestamp)] += 1
            self.last_injected_at = max(self.last_injected_at, injection.timestamp)
        self.newest[injection.goal_id] = injection

    def add_outcome(self, feedback: Feedback) -> None:
        _add(self.folder, feedback)
        self.outcomes[feedback.goal_id] = feedback
        self._known += known_outcomes({feedback.goal_id: self.newest[feedback.goal_id]}, self.outcomes)

    def interrupted(self) -> list[Injection]:
        return [one for one in self.newest.values() if one.injected and one.goal_id not in self.outcomes]

    def unreported(self) -> list[tuple[Injection, Feedback]]:
        """Return goals whose outcome is recorded and whose reward was not sent yet."""
        return [
            (one, self.outcomes[one.goal_id])
            for one in self.newest.values()
            if one.injected and not one.processed and one.goal_id in self.outcomes
        ]

    def known_outcomes(self, since: float = 0.0) -> list[KnownOutcome]:
        """Return the newest goals whose success is known, oldest first. since: Unix time in seconds."""
        return [(one, success) for one, success in self._known[-RECENT:] if one.timestamp >= since]

    def injected_on(self, at: float) -> int:
        return self._days[_day(at)]

    def is_vetoed(self, goal_id: str) -> bool:
        return any(one.goal_id == goal_id for one in records(Veto, self.folder))

    def stop(self, why: str, at: float) -> None:
        add_line(self.folder / STOPPED, {"why": why, "timestamp": at})

    def start_again(self, *, allowed: bool) -> float:
        """Return the Unix time from which outcomes count for drift.

        Raises Fatal where the injector had stopped itself and `allowed` is false.
        """
        last = _last(Stop, self.folder)
        if last is None or last.resumed:
            return 0.0 if last is None else last.timestamp
        if not allowed:
            raise Fatal(f"injecting stopped: {last.why}; look with --explain, then start with --resume")
        again = Stop(why=last.why, timestamp=time.time(), resumed=True)
        _add(self.folder, again)
        return again.timestamp


def newest(kind: type[GoalLine], folder: Path, most_bytes: int | None = None) -> dict[str, GoalLine]:
    """Return the newest line of every goal, in the order in which goals were first named."""
    return {record.goal_id: record for record in records(kind, folder, most_bytes)}


def _last(kind: type[Record], folder: Path) -> Record | None:
    return next(iter(deque(records(kind, folder), 1)), None)


def stopped_by(folder: Path) -> str | None:
    """Return why an injector has stopped itself; None where it may continue."""
    last = _last(Stop, folder)
    return None if last is None or last.resumed else last.why


def known_outcomes(newest: dict[str, Injection], outcomes: dict[str, Feedback]) -> list[KnownOutcome]:
    """Return the goals whose success is known, in the order of `newest`."""
    return [
        (one, found.success)
        for one in newest.values()
        if (found := outcomes.get(one.goal_id)) and found.success is not None
    ]


class UnknownGoal(ConfigurationError):
    """A goal that was never proposed in a folder."""


class TooLate(Fatal):
    """The goal was carried out already, or will not be in any case; the text says which."""


def veto(folder: Path, goal_id: str, by: str = "") -> None:
    """Forbid a goal, once; raises UnknownGoal, or TooLate where a veto would have no effect."""
    found = newest(Injection, folder).get(goal_id)
    if found is None:
        raise UnknownGoal(f"--veto {goal_id}: no such goal in {folder / INJECTIONS}; copy its goal_id")
    if found.injected:
        raise TooLate("the goal was carried out already: give the next ones more time with --veto-s")
    held = found.metadata.get("held")
    if held and held != VETO:
        raise TooLate(f"the goal is not carried out anyway: {held}")
    if not held:
        _add(folder, Veto(goal_id=goal_id, timestamp=time.time(), by=by))


def _day(at: float) -> tuple[int, ...]:
    return tuple(time.localtime(at)[:3])


# ---- The switch of a folder: whether goals are carried out. It may change while the injector runs.


def switch(folder: Path, *, on: bool, by: str = "") -> None:
    """Switch the injector of a folder; raises ConfigurationError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"--folder {folder}: is no folder; name the one that `penstock inject` works in"
        )
    _add(folder, Switch(on=on, by=by, timestamp=time.time()))


def last_switch(folder: Path) -> Switch | None:
    """Return how a folder was switched last; None where it never was."""
    return _last(Switch, folder)


def is_on(folder: Path, *, default: bool) -> bool:
    """Return whether goals are carried out. default: used while the folder was never switched."""
    last = last_switch(folder)
    return default if last is None else last.on


# ---- When a goal may be carried out: by the hour, by the day, by the operator's permission.

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


def quiet_minutes(hours: str) -> tuple[int, int]:
    """Return the minutes of the local day at which HH:MM-HH:MM begins and ends; raises ValueError."""
    found = _HOURS.fullmatch(hours)
    if found is None:
        raise ValueError(f"quiet hours {hours!r}: write HH:MM-HH:MM, such as 22:00-06:30")
    first, second, third, fourth = map(int, found.groups())
    begin, end = first * 60 + second, third * 60 + fourth
    if begin == end:
        raise ValueError(f"quiet hours {hours!r}: begin and end are the same; leave them out for none")
    return begin, end


def is_quiet(hours: str, at: float) -> bool:
    """Return whether a Unix time lies within HH:MM-HH:MM of the local day, which may pass midnight."""
    begin, end = quiet_minutes(hours)
    local = time.localtime(at)
    minute = local.tm_hour * 60 + local.tm_min
    return begin <= minute < end if begin < end else minute >= begin or minute < end


class InjectionRules(_Line):
    """What holds for every goal, whatever the policy draws.

    threshold, explore: of the gate. interval_s: seconds between two decisions. veto_s: seconds in which a
    goal may be vetoed. quiet: HH:MM-HH:MM each, in which nothing is injected.
    """

    threshold: float
    explore: float
    interval_s: float = 30.0
    daily_limit: int = 1000
    veto_s: float = 0.0
    quiet: list[str] = []

    def forbids(self, at: float, injected_today: int, *, auto: bool) -> str:
        """Return why nothing may be carried out at a Unix time; "" where it may."""
        if not auto:
            return "auto is off"
        if any(is_quiet(hours, at) for hours in self.quiet):
            return "quiet hours"
        if injected_today >= self.daily_limit:
            return "daily limit"
        return ""


# ---- The state of an injector that runs, for readers of its folder: `pulse.json`.

PULSE: Final = "pulse.json"
_MOST_BYTES: Final = 65_536


class Beat(InjectionRules):
    """The state at one interval. trouble: why nothing was proposed; "" for no trouble."""

    at: float
    auto: bool
    trouble: str
    version: int
    ended: bool = False


def write_beat(folder: Path, beat: Beat) -> None:
    """Write a beat in place of the one before; raises OSError."""
    replace_file(folder / PULSE, beat.model_dump_json().encode())


def last_beat(folder: Path) -> Beat | None:
    """Return the newest beat of a folder; None where there is none that can be read."""
    try:
        with (folder / PULSE).open("rb") as file:
            return Beat.model_validate_json(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return None


# ---- The probability of success: a logistic fit of the last outcomes on the logit of π(a) (Platt 1999).

LAST: Final = 200
"""Outcomes that are fitted."""
_FEWEST: Final = 20
"""Outcomes below which only the rate is estimated, drawn to one half."""
_RIDGE: Final = np.array([1e-3, 1.0])
"""Of the offset, which is almost free, and of the slope."""
_BINS: Final = 5
_LARGEST_LOGIT: Final = 8.0


@dataclass(frozen=True, slots=True)
class SuccessFit:
    """Probability of success = σ(offset + slope · logit π(a))."""

    offset: float
    slope: float

    def at(self, certainty: float) -> float:
        return 0.5 * (1 + math.tanh((self.offset + self.slope * _logit(certainty)) / 2))


def fit_success(certainties: Sequence[float], successes: Sequence[bool]) -> SuccessFit:
    """Fit the last 200 outcomes; with fewer than 20 the slope is 0 and the rate that of Laplace."""
    seen = np.array([_logit(one) for one in certainties[-LAST:]], np.float64)
    well = np.array(successes[-LAST:], np.float64)
    rate = (well.sum() + 1) / (len(well) + 2)
    if len(well) < _FEWEST:
        return SuccessFit(math.log(rate / (1 - rate)), 0.0)
    offset, slope = fit_logistic(np.stack([np.ones_like(seen), seen], 1), well, _RIDGE, np.zeros(2))
    return SuccessFit(float(offset), float(slope))


def reliability(predicted: Sequence[float], successes: Sequence[bool]) -> dict[str, float] | None:
    """Return how well predicted probabilities fit the last 200 outcomes; None below 20.

    brier: mean squared error. gap: mean distance between probability and rate over five groups of equal size,
    from the least to the most likely. outcomes: how many were compared.
    """
    chance, well = np.array(predicted[-LAST:], np.float64), np.array(successes[-LAST:], np.float64)
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
    if not 0 < probability < 1:
        return math.copysign(_LARGEST_LOGIT, probability - 0.5)
    return min(max(math.log(probability / (1 - probability)), -_LARGEST_LOGIT), _LARGEST_LOGIT)
