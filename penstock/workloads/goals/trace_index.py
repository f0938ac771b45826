"""Logs of tasks: their lines, an index of a log of any size, and what a policy sees of a line.

A line is a decision of a live system and its outcome:

    {"time": 1790000000.5, "episode": "monday", "step": 0, "observation": {"cpu": 0.71, "disk": 0.4},
     "goal": "free some disk", "action": "rotate_logs", "propensity": 0.25,
     "result": {"success": true, "output": "3 files", "execution_time_ms": 41.5}, "metadata": {"host": "a"}}

`propensity` is the probability with which the action was chosen. Leave it out where it is unknown: where
the action was the most likely one and not drawn, was a fallback, or was changed by a gate of unknown
probability.

The index is a temporary file of some 100 bytes a line. An episode with a broken, doubled or missing line is
left out, and counted. Only `held_log` holds a whole log in memory.
"""

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.row_file import RowFile, parse_row

MOST_LINE_BYTES: Final = 2**20
MOST_STEPS: Final = 10_000
"""Decisions of one episode."""

_LAST_TIME: Final = 1e11
"""A later one, beyond the year 5000, is of milliseconds."""
_Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e12, le=1e12, strict=True)]
_Name = Annotated[str, Field(min_length=1, max_length=128)]
_Action = Annotated[str, Field(max_length=128, pattern=r"^[^\s\p{Cc}]([^\p{Cc}]*[^\s\p{Cc}])?$")]
"""Without surrounding white space and control characters: two actions that look the same are the same."""


class Brought(BaseModel):
    """An object of a file that people bring; a null says as much as a field that is absent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Result(Brought):
    """The outcome of an action. `crashed`: the system that acted failed as well."""

    success: Annotated[bool, Field(strict=True)]
    output: str = ""
    error: str = ""
    execution_time_ms: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] | None = None
    crashed: Annotated[bool, Field(strict=True)] = False


class Trace(Brought):
    """A valid line of a log. time: Unix, in seconds. step: of its episode, from 0."""

    time: Annotated[float, Field(ge=0, le=_LAST_TIME, allow_inf_nan=False, strict=True)]
    episode: _Name
    step: Annotated[int, Field(ge=0, lt=MOST_STEPS, strict=True)]
    observation: Annotated[dict[_Name, _Number], Field(min_length=1, max_length=4096)]
    goal: Annotated[str, Field(max_length=4096)] = ""
    action: _Action
    propensity: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    result: Result
    metadata: dict[str, Any] = {}


class BadLine(ValueError):
    """A line that is no trace; the text names field, value and what is allowed."""


def parse(line: bytes) -> Trace:
    try:
        return Trace.model_validate(parse_row(line, MOST_LINE_BYTES))
    except ValidationError as error:
        raise BadLine(explained(error)) from error
    except ValueError as error:
        raise BadLine(str(error)) from error


def explained(error: ValidationError) -> str:
    """Return the first three mistakes of a line, each with its field and value."""
    return "; ".join(map(_explained, error.errors()[:3]))


def _explained(one: Any) -> str:
    field = ".".join(str(part) for part in one["loc"]) or "line"
    if one["type"] == "missing":
        return f"{field}: is missing"
    unit = ", and this is of milliseconds: divide it by 1000" if one.get("ctx") == {"le": _LAST_TIME} else ""
    return f"{field}={str(one['input'])[:80]!r}: {one['msg'].lower()}{unit}"


# ---- The reward of an outcome, with weights that a user may change.


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWeights:
    """Rewards of a decision, which add up. fast: of a success within `fast_ms`."""

    success: float = 1.0
    failure: float = -0.5
    crash: float = -1.0
    step: float = -0.01
    fast: float = 0.2
    fast_ms: float = 100.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "RewardWeights":
        """Return weights from settings; raises ConfigurationError that names the key."""
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigurationError(f"reward.{name}: unknown; known: {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
                raise ConfigurationError(f"reward.{name}={value!r}: must be a number up to 1e6")
        return cls(**{name: float(value) for name, value in given.items()})

    def reward(self, result: Result) -> float:
        took = result.execution_time_ms
        fast = result.success and took is not None and took < self.fast_ms
        return (
            self.step
            + (self.success if result.success else self.failure)
            + (self.crash if result.crashed else 0.0)
            + (self.fast if fast else 0.0)
        )


# ---- The index of a file.

MOST_FAULTS: Final = 50_000
MOST_LINES: Final = 500_000
"""Lines of a file that is held in memory, some 4 kB a line."""
MOST_HELD: Final = 100_000
"""Decisions that an environment holds in memory; of a larger log it has a sample of the episodes."""
_CACHE_KB: Final = 32_768
_BROKEN_STEP: Final = -1
"""Step of a line that is known to belong to an episode, and cannot be used."""
_NAMED: Final = re.compile(rb'"episode"\s*:\s*"([^"\\]{1,128})"')

_Row = tuple[str, int, int, int, str, bool, bool]
"""Episode, step, number of the line, its offset in the file, action, success, whether it has a propensity."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a line, counted from 1."""

    line: int
    why: str


@dataclass(slots=True)
class TraceIndex:
    """The content of a file; counts are those of whole episodes, `lines` those of all but empty lines.

    faults: in the order of their lines. broken: names of the episodes that are left out. numbers: names of
    the numbers of an observation, sorted. done, well: how often each action was done, and with success.
    """

    path: Path
    _file: RowFile
    _database: sqlite3.Connection
    lines: int = 0
    faults: list[Fault] = field(default_factory=list)
    broken: dict[str, None] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    episodes: int = 0
    decisions: int = 0
    with_propensity: int = 0
    done: Counter[str] = field(default_factory=Counter)
    well: Counter[str] = field(default_factory=Counter)

    @classmethod
    @contextmanager
    def of(cls, path: Path, most_lines: int | None = None) -> Iterator["TraceIndex"]:
        """Yield the index of a file; ConfigurationError: more than `most_lines` or MOST_FAULTS, no room."""
        with closing(_temporary()) as database, RowFile.of(path) as file:
            index = cls(path, file, database)
            try:
                database.executemany("INSERT INTO line VALUES (?, ?, ?, ?, ?, ?, ?)", index._rows(most_lines))
                index._find_broken()
                index._count()
                index.faults.sort(key=lambda fault: fault.line)
            except OSError as error:
                raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
            except sqlite3.OperationalError as error:
                raise ConfigurationError(
                    f"{path}: no room for an index of its lines: {error}; let TMPDIR name a larger folder"
                ) from error
            yield index

    @property
    def independent(self) -> bool:
        return self.episodes == self.decisions

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(sorted(self.done))

    @property
    def encoding(self) -> "Encoding":
        return Encoding(self.numbers, self.actions)

    def check_episodes(self) -> None:
        if not self.lines:
            raise ConfigurationError(f"{self.path}: is empty: a log has a line for each decision")
        if not self.episodes:
            first = f", the first at line {self.faults[0].line}: {self.faults[0].why}" if self.faults else ""
            raise ConfigurationError(
                f"{self.path}: holds no whole episode, but {len(self.faults)} faults{first}; "
                "`penstock traces check` lists them"
            )

    def traces(self) -> Iterator[Trace]:
        """Yield the decisions of all whole episodes, episode by episode in the order of first lines."""
        for line in self.whole_lines():
            try:
                yield parse(line)
            except BadLine as error:
                raise ConfigurationError(f"{self.path}: was changed while it was read: {error}") from error

    def whole_episodes(self) -> Iterator[tuple[Trace, ...]]:
        for _, traces in groupby(self.traces(), attrgetter("episode")):
            yield tuple(traces)

    def whole_lines(self) -> Iterator[bytes]:
        """Yield the lines of `traces` as they stand in the file, without their ends."""
        for (place,) in self._database.execute(
            "SELECT place FROM line ORDER BY MIN(number) OVER (PARTITION BY episode), step"
        ):
            yield self._file.line_at(place, MOST_LINE_BYTES)

    def _rows(self, most_lines: int | None) -> Iterator[_Row]:
        for number, place, line in self._file.lines(MOST_LINE_BYTES):
            self.lines += 1
            if most_lines is not None and self.lines > most_lines:
                raise ConfigurationError(
                    f"{self.path}: has more than {most_lines:,} lines: split it, where no episode is cut"
                )
            row = self._row(number, place, line)
            if row is not None:
                yield row

    def _row(self, number: int, place: int, line: bytes) -> _Row | None:
        try:
            trace = parse(line)
        except BadLine as error:
            self._add_fault(number, str(error))
            episode = _episode_of(line)
            return None if episode is None else (episode, _BROKEN_STEP, number, place, "", False, False)
        seen = tuple(sorted(trace.observation))
        self.numbers = self.numbers or seen
        if seen != self.numbers:
            lacks, has = sorted({*self.numbers} - {*seen}), sorted({*seen} - {*self.numbers})
            why = f"observation: lacks {lacks} and has {has}, unlike the first line; log the same names"
            self._add_fault(number, why)
            return trace.episode, _BROKEN_STEP, number, place, "", False, False
        known = trace.propensity is not None
        return trace.episode, trace.step, number, place, trace.action, trace.result.success, known

    def _add_fault(self, line: int, why: str) -> None:
        self.faults.append(Fault(line, why))
        if len(self.faults) > MOST_FAULTS:
            first = min(self.faults, key=lambda fault: fault.line)
            raise ConfigurationError(
                f"{self.path}: has more than {MOST_FAULTS:,} faults: is it a log of tasks? The first is line "
                f"{first.line}: {first.why}"
            )

    def _find_broken(self) -> None:
        """Add the faults of episodes with doubled or missing steps, and drop the lines of all broken ones."""
        rows = self._database.execute(
            "SELECT * FROM (SELECT episode, step, number, LAG(step, 1, -1) OVER steps AS before, "
            "FIRST_VALUE(number) OVER (PARTITION BY episode, step ORDER BY number) FROM line "
            "WINDOW steps AS (PARTITION BY episode ORDER BY step, number)) "
            "WHERE step != before + 1 ORDER BY episode, step, number"
        )
        explained = ""  # an episode with a broken line, or of which the first missing step is known
        for name, step, number, before, first in rows:
            self.broken[name] = None
            if step == _BROKEN_STEP:
                explained = name
            elif step == before:
                why = f"step={step} of episode {name!r} is there already, at line {first}"
                self._add_fault(number, why)
            elif name != explained:
                self._add_fault(number, f"episode {name!r}: step {before + 1} is missing before step {step}")
                explained = name
        self._database.executemany("INSERT INTO broken VALUES (?)", ((name,) for name in self.broken))
        self._database.execute("DELETE FROM line WHERE episode IN (SELECT episode FROM broken)")

    def _count(self) -> None:
        self.episodes = self._database.execute("SELECT COUNT(DISTINCT episode) FROM line").fetchone()[0]
        for action, done, well, known in self._database.execute(
            "SELECT action, COUNT(*), SUM(success), SUM(known) FROM line GROUP BY action"
        ):
            self.done[action], self.well[action] = done, well
            self.decisions += done
            self.with_propensity += known


def _temporary() -> sqlite3.Connection:
    """Return a database in a file without a name, which is deleted when the connection closes."""
    made = sqlite3.connect("", isolation_level=None)
    made.execute("PRAGMA journal_mode = OFF")
    made.execute("PRAGMA synchronous = OFF")
    made.execute("PRAGMA temp_store = FILE")
    made.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
    made.execute(
        "CREATE TABLE line (episode TEXT, step INTEGER, number INTEGER, place INTEGER, action TEXT, "
        "success INTEGER, known INTEGER)"
    )
    made.execute("CREATE TABLE broken (episode TEXT PRIMARY KEY)")
    made.execute("BEGIN")
    return made


def _episode_of(line: bytes) -> str | None:
    """Return the episode of a line that is no trace; None where it is unknown."""
    try:
        parsed = json.loads(line)
        found = parsed.get("episode") if isinstance(parsed, dict) else None
        # Half of a surrogate pair is no text, and no name.
        return found.encode().decode() if isinstance(found, str) else None
    except UnicodeEncodeError:
        return None
    except (ValueError, RecursionError):
        named = _NAMED.search(line)
        return None if named is None else named[1].decode(errors="replace")


# ---- A log that is held in memory as a whole.


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The whole episodes of a file, each a tuple of its traces by step; the rest is that of its index."""

    episodes: tuple[tuple[Trace, ...], ...]
    encoding: "Encoding"
    independent: bool

    @property
    def traces(self) -> tuple[Trace, ...]:
        return tuple(trace for episode in self.episodes for trace in episode)


def held_log(path: Path) -> Log:
    """Return the content of a file; raises ConfigurationError where it has no whole episode."""
    with TraceIndex.of(path, MOST_LINES) as index:
        index.check_episodes()
        episodes = tuple(index.whole_episodes())
        return Log(episodes=episodes, encoding=index.encoding, independent=index.independent)


def shared_log(path: Path) -> Log:
    """Return the result of `held_log`, computed once per process while the file does not change."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    return _shared(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1)
def _shared(path: Path, _inode: int, _changed: int, _size: int) -> Log:
    return held_log(path)


def write_sample(index: TraceIndex, path: Path) -> int:
    """Write every n-th whole episode, about MOST_HELD decisions, and return their number."""
    every = -(-index.decisions // MOST_HELD)
    number = -1
    written = decisions = 0
    with path.open("wb") as file:
        for line in index.whole_lines():
            begins = parse(line).step == 0
            number += begins
            if number % every:
                continue
            if begins and decisions >= MOST_HELD:
                break
            written += begins
            decisions += 1
            file.write(line + b"\n")
    return written


# ---- A trace as a policy observes it.

GOAL_WIDTH: Final = 16
_LAST_WIDTH: Final = 4


@dataclass(frozen=True, slots=True)
class Encoding:
    """How traces become vectors, and actions numbers: names of both, in their order."""

    numbers: tuple[str, ...]
    actions: tuple[str, ...]

    @property
    def width(self) -> int:
        return len(self.numbers) + GOAL_WIDTH + _LAST_WIDTH

    def observation(self, trace: Trace, before: Result | None) -> NDArray[np.float32]:
        """Return the observation, float32 [width]. before: result of the decision before it."""
        numbers = [trace.observation[name] for name in self.numbers]
        return np.array([*numbers, *_hashed(trace.goal), *_last(before)], np.float32)

    def episodes(self, episodes: Sequence[Sequence[Trace]]) -> NDArray[np.float32]:
        """Return the observation of every decision, float32 [n, width], episode by episode."""
        rows = [
            self.observation(trace, episode[step - 1].result if step else None)
            for episode in episodes
            for step, trace in enumerate(episode)
        ]
        return np.stack(rows) if rows else np.zeros((0, self.width), np.float32)

    def action(self, name: str) -> int:
        """Return the number of an action; raises ValueError that lists the known ones."""
        if name not in self.actions:
            raise ValueError(f"action={name!r}: not one of {', '.join(self.actions)}")
        return self.actions.index(name)


@lru_cache(maxsize=1024)
def _hashed(goal: str) -> tuple[float, ...]:
    """Words of a text as a signed hash of length 1 (Weinberger et al. 2009); zeros without words."""
    vector = [0.0] * GOAL_WIDTH
    for word in re.findall(r"\w+", goal.lower()):
        digest = blake2b(word.encode(), digest_size=8).digest()
        vector[digest[0] % GOAL_WIDTH] += 1.0 if digest[1] & 1 else -1.0
    length = math.hypot(*vector) or 1.0
    return tuple(one / length for one in vector)


def _last(result: Result | None) -> list[float]:
    if result is None:
        return [0.0] * _LAST_WIDTH
    took = math.log1p(result.execution_time_ms or 0.0)
    return [1.0, float(result.success), float(bool(result.error)), took]
