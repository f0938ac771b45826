"""The folder of an injector: both files, its lock, and what they say of goals that were proposed before.

Order of the lines of one goal, each on the disk before anything else happens:

    proposed ─► injected ─► (carried out) ─► feedback ─► processed

A kill before "injected": nothing was done. Between "injected" and feedback: the outcome is unknown, so the
goal is booked as interrupted, and is never carried out again. Between feedback and "processed": the reward is
reported again, under the same request id, so that it counts once.
"""

import fcntl
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import Fatal
from penstock.workloads.goals.injector.durable_lines import DurableLines, FollowedLines, add_alone, read_lines
from penstock.workloads.goals.injector.injection_records import Feedback, Injection, Veto, read_record

INJECTIONS: Final = "goal_injections.jsonl"
FEEDBACK: Final = "rl_feedback.jsonl"
VETOES: Final = "goal_vetoes.jsonl"
STOPPED: Final = "stopped.json"
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
        """Read a folder; raises ConfigurationError for lines that cannot be read."""
        self.folder = folder
        self._injections = DurableLines(folder / INJECTIONS)
        self._feedback = DurableLines(folder / FEEDBACK)
        self.newest = read_injections(folder)
        self.outcomes = read_feedback(folder)
        self._told = told_of(self.newest, self.outcomes)
        self._days = Counter(_day(one.timestamp) for one in self.newest.values() if one.injected)
        self._last = max((one.timestamp for one in self.newest.values() if one.injected), default=0.0)
        self._vetoes = FollowedLines(folder / VETOES)
        self._vetoed: set[str] = set()

    @classmethod
    @contextmanager
    def held(cls, folder: Path) -> Iterator["InjectionJournal"]:
        """Yield the journal of a folder, which is made, and which no other process holds meanwhile.

        Raises ConfigurationError where another one does, and where no folder can be.
        """
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
        """Add a line of a goal: it is its newest."""
        self._injections.add(injection.model_dump())
        before = self.newest.get(injection.goal_id)
        if injection.injected and not (before and before.injected):
            self._days[_day(injection.timestamp)] += 1
            self._last = max(self._last, injection.timestamp)
        self.newest[injection.goal_id] = injection

    def add_outcome(self, feedback: Feedback) -> None:
        """Add what became of a goal."""
        self._feedback.add(feedback.model_dump())
        self.outcomes[feedback.goal_id] = feedback
        self._told += told_of({feedback.goal_id: self.newest[feedback.goal_id]}, self.outcomes)

    def interrupted(self) -> list[Injection]:
        """Return goals that were injected and whose outcome is unknown."""
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

    def last_injected_at(self) -> float:
        """Return when a goal was last injected, Unix time in seconds; 0 for never."""
        return self._last

    def injected_on(self, at: float) -> int:
        """Return how many goals were injected on the local day of a moment, Unix time in seconds."""
        return self._days[_day(at)]

    def is_vetoed(self, goal_id: str) -> bool:
        """Return whether the operator forbids a goal."""
        for number, line in self._vetoes.new():
            self._vetoed.add(read_record(Veto, VETOES, number, line).goal_id)
        return goal_id in self._vetoed

    def stop(self, why: str, at: float) -> None:
        """Note that injecting has stopped until an operator allows it again."""
        stopped = DurableLines(self.folder / STOPPED)
        stopped.add({"why": why, "timestamp": at})
        stopped.close()

    def start_again(self, *, allowed: bool) -> float:
        """Return since when outcomes count for drift, Unix time in seconds.

        allowed: the operator lets it go on after a stop. Raises Fatal where it has stopped and may not.
        """
        stops = [line for _, line in read_lines(self.folder / STOPPED)]
        if stops and not stops[-1].get("resumed") and not allowed:
            raise Fatal(
                f"injecting stopped: {stops[-1].get('why')}; look with --explain, then start with --resume"
            )
        if stops and not stops[-1].get("resumed"):
            resumed = DurableLines(self.folder / STOPPED)
            resumed.add({**stops[-1], "resumed": True, "timestamp": time.time()})
            resumed.close()
            return time.time()
        return float(stops[-1].get("timestamp", 0.0)) if stops else 0.0

    def close(self) -> None:
        """Close both files."""
        self._injections.close()
        self._feedback.close()


def read_injections(folder: Path) -> dict[str, Injection]:
    """Return the newest line of every goal, in the order in which the goals were proposed."""
    return {
        line["goal_id"]: read_record(Injection, INJECTIONS, number, line)
        for number, line in _with_id(folder / INJECTIONS)
    }


def read_feedback(folder: Path) -> dict[str, Feedback]:
    """Return what became of every goal."""
    return {
        line["goal_id"]: read_record(Feedback, FEEDBACK, number, line)
        for number, line in _with_id(folder / FEEDBACK)
    }


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
    """Note that a goal must not be carried out; again for one that was vetoed changes nothing.

    Raises UnknownGoal for one that was never proposed, TooLate for one that no veto can hold.
    """
    found = read_injections(folder).get(goal_id)
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


def _with_id(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in read_lines(path):
        if not isinstance(line.get("goal_id"), str):
            raise ConfigurationError(f"{path}: line {number}: goal_id is missing; move the file away")
        yield number, line
