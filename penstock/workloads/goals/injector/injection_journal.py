"""The folder of an injector: both files, its lock, and what they say of goals that were proposed before.

Order of the lines of one goal, each on the disk before anything else happens:

    proposed ─► injected ─► (carried out) ─► feedback ─► processed

A kill before "injected": nothing was done. Between "injected" and feedback: the outcome is unknown, so the
goal is booked as interrupted, and is never carried out again. Between feedback and "processed": the reward is
reported again, under the same request id, so that it counts once.
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import Fatal
from penstock.runtime.output_file import sync_folder
from penstock.workloads.goals.injector.injection_records import Feedback, Injection, Veto, read_record

# ---- Files of JSON lines that survive a kill at any moment: what was added is there, whole, or not at all.

_CHUNK: Final = 65_536


class DurableLines:
    """One file, written by one process; `add_alone` is for one that several write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._cut_torn_line()
        sync_folder(path.parent)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; it is on the disk when this returns. Raises OSError, and then the file is unchanged."""
        size = os.fstat(self._file).st_size
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        os.close(self._file)

    def _cut_torn_line(self) -> None:
        size = end = os.fstat(self._file).st_size
        while end:
            begin = max(end - _CHUNK, 0)
            newline = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end != size:
            os.ftruncate(self._file, end)
            os.fsync(self._file)


def add_alone(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file that other processes add lines to as well; raises as `DurableLines` does."""
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = DurableLines(path)
        try:
            lines.add(line)
        finally:
            lines.close()


class FollowedLines:
    """Reads a file that others add lines to: each whole line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._number = 0

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and content of each whole line not yet yielded; none without a file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    self._number += 1
                    yield self._number, _parsed(self._path, self._number, line)
        except FileNotFoundError:
            return


def read_newest_lines(path: Path, most_bytes: int) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yield the whole lines in the last `most_bytes`, oldest first; none without a file."""
    try:
        with path.open("rb") as file:
            begin = max(file.seek(0, os.SEEK_END) - most_bytes, 0)
            file.seek(max(begin - 1, 0))
            if begin and file.read(1) != b"\n":
                file.readline()
            for line in file:
                if line.endswith(b"\n"):
                    yield None, _parsed(path, None, line)
    except FileNotFoundError:
        return


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number, from 1, and content of every whole line; none without a file."""
    return FollowedLines(path).new()


def _parsed(path: Path, number: int | None, line: bytes) -> dict[str, Any]:
    """number: of the line; None where it is not known."""
    which = "a line near the end" if number is None else f"line {number}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {which} is no JSON: {error}; move the file away") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: {which} is no JSON object; move the file away")
    return found


INJECTIONS: Final = "goal_injections.jsonl"
FEEDBACK: Final = "rl_feedback.jsonl"
VETOES: Final = "goal_vetoes.jsonl"
STOPPED: Final = "stopped.json"
_FILES: Final[dict[type, str]] = {Injection: INJECTIONS, Feedback: FEEDBACK, Veto: VETOES}
_LOCK: Final = "injector.lock"
RECENT: Final = 250
"""Outcomes that fits and drift look at."""
VETO: Final = "veto"
"""What held back a goal that an operator forbade, as `held` in its metadata."""
INTERRUPTED: Final = "interrupted: the injector ended while the goal was carried out"


@dataclass(frozen=True, slots=True)
class Told:
    """A goal whose outcome is known: how sure the policy was, what had been expected, what became of it."""

    certainty: float
    expected: float
    success: bool
    version: int
    at: float


class InjectionJournal:
    """What was proposed, injected and learned in one folder. One process holds it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._injections = DurableLines(folder / INJECTIONS)
        self._feedback = DurableLines(folder / FEEDBACK)
        self.newest, self.outcomes = newest(Injection, folder), newest(Feedback, folder)
        self._told = told_of(self.newest, self.outcomes)
        injected = [one.timestamp for one in self.newest.values() if one.injected]
        self._days = Counter(map(_day, injected))
        self.last_injected_at = max(injected, default=0.0)
        """Unix time in seconds; 0 for never."""
        self._vetoes = FollowedLines(folder / VETOES)
        self._vetoed: set[str] = set()

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
            journal = cls(folder)
            try:
                yield journal
            finally:
                journal.close()

    def add(self, injection: Injection) -> None:
        self._injections.add(injection.model_dump())
        before = self.newest.get(injection.goal_id)
        if injection.injected and not (before and before.injected):
            self._days[_day(injection.timestamp)] += 1
            self.last_injected_at = max(self.last_injected_at, injection.timestamp)
        self.newest[injection.goal_id] = injection

    def add_outcome(self, feedback: Feedback) -> None:
        self._feedback.add(feedback.model_dump())
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
        return [one for one in self._told[-RECENT:] if one.at >= since]

    def injected_on(self, at: float) -> int:
        return self._days[_day(at)]

    def is_vetoed(self, goal_id: str) -> bool:
        for number, line in self._vetoes.new():
            self._vetoed.add(read_record(Veto, VETOES, number, line).goal_id)
        return goal_id in self._vetoed

    def stop(self, why: str, at: float) -> None:
        add_alone(self.folder / STOPPED, {"why": why, "timestamp": at})

    def start_again(self, *, allowed: bool) -> float:
        """Return since when outcomes count for drift; raises Fatal where it had stopped and may not go on."""
        stopped = stopped_by(self.folder)
        if stopped is None:
            return float(_last_stop(self.folder).get("timestamp", 0.0))
        if not allowed:
            raise Fatal(
                f"injecting stopped: {stopped.get('why')}; look with --explain, then start with --resume"
            )
        now = time.time()
        add_alone(self.folder / STOPPED, {**stopped, "resumed": True, "timestamp": now})
        return now

    def close(self) -> None:
        self._injections.close()
        self._feedback.close()


Line = TypeVar("Line", Injection, Feedback, Veto)


def newest(kind: type[Line], folder: Path, most_bytes: int | None = None) -> dict[str, Line]:
    """Return the newest line of every goal, in the order in which goals were first named.

    most_bytes: how much of the end of the file is read; None: all.
    """
    path = folder / _FILES[kind]
    found: dict[str, Line] = {}
    for number, line in read_lines(path) if most_bytes is None else read_newest_lines(path, most_bytes):
        record = read_record(kind, path.name, number, line)
        found[record.goal_id] = record
    return found


def stopped_by(folder: Path) -> dict[str, Any] | None:
    """Return the line that says why an injector has stopped itself; None where it may go on."""
    last = _last_stop(folder)
    return None if not last or last.get("resumed") else last


def _last_stop(folder: Path) -> dict[str, Any]:
    lines = [line for _, line in read_lines(folder / STOPPED)]
    return lines[-1] if lines else {}


def told_of(newest: dict[str, Injection], outcomes: dict[str, Feedback]) -> list[Told]:
    """Return the goals whose success is known, in the order of `newest`."""
    return [
        Told(one.confidence, one.priority, found.success, one.version, one.timestamp)
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
        add_alone(folder / VETOES, Veto(goal_id=goal_id, timestamp=time.time(), by=by).model_dump())


def _day(at: float) -> tuple[int, ...]:
    return tuple(time.localtime(at)[:3])
