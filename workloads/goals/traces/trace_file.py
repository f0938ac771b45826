"""A log read as a whole: its episodes, and every fault with the number of its line.

Nothing is guessed: an episode with a broken, doubled or missing line is left out, and counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final

from penstock.config.configuration_error import ConfigurationError
from workloads.goals.traces.trace_line import MOST_LINE_BYTES, BadLine, Trace, parse

MOST_LINES: Final = 500_000
"""Lines of one file: a log is held in memory, some 4 kB a line."""
MOST_FAULTS: Final = 50_000


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a line, counted from 1."""

    line: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What a file holds.

    episodes: the whole ones in the order of their first lines, each a tuple of its traces by step.
    faults: in the order of their lines. lines: all but empty ones. broken: episodes that are left out.
    """

    episodes: tuple[tuple[Trace, ...], ...]
    faults: tuple[Fault, ...]
    lines: int
    broken: tuple[str, ...]

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Return the traces of all whole episodes, episode by episode."""
        return tuple(trace for episode in self.episodes for trace in episode)

    @property
    def independent(self) -> bool:
        """Whether every episode is a single decision."""
        return all(len(episode) == 1 for episode in self.episodes)

    @property
    def actions(self) -> tuple[str, ...]:
        """Return the names of all actions, sorted."""
        return tuple(sorted({trace.action for trace in self.traces}))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the names of what is observed, sorted; the same in every line."""
        return tuple(sorted(self.episodes[0][0].observation)) if self.episodes else ()


def read_log(path: Path) -> Log:
    """Return what a file of JSON lines holds.

    Raises ConfigurationError where it cannot be opened, and for more lines or faults than are read.
    """
    reading = _Reading()
    try:
        with path.open("rb") as file:
            for number, line in _lines(file):
                reading.take(number, line)
                _check_bounds(path, reading)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    return reading.log()


def _check_bounds(path: Path, reading: "_Reading") -> None:
    if reading.lines > MOST_LINES:
        raise ConfigurationError(
            f"{path}: has more than {MOST_LINES:,} lines: split it, where no episode is cut"
        )
    if len(reading.faults) > MOST_FAULTS:
        first = reading.faults[0]
        raise ConfigurationError(
            f"{path}: has more than {MOST_FAULTS:,} faults: is it a log of tasks? The first is line "
            f"{first.line}: {first.why}"
        )


def need_episodes(path: Path) -> Log:
    """Return what a file holds; raises ConfigurationError where it holds no whole episode."""
    log = read_log(path)
    if not log.episodes:
        first = f", the first at line {log.faults[0].line}: {log.faults[0].why}" if log.faults else ""
        raise ConfigurationError(
            f"{path}: holds no whole episode, but {len(log.faults)} faults{first}; "
            "`penstock traces check` lists them"
        )
    return log


def shared_episodes(path: Path) -> Log:
    """Return what `need_episodes` does, read once for all of this process while the file is the same."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    return _shared(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1)
def _shared(path: Path, _inode: int, _changed: int, _size: int) -> Log:
    return need_episodes(path)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield every line that is not empty with its number; of one that is too long its beginning."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        whole = line
        while whole and not whole.endswith(b"\n"):
            whole = file.readline(MOST_LINE_BYTES + 1)
        if line.strip():
            yield number, line.rstrip(b"\r\n")


@dataclass(slots=True)
class _Reading:
    lines: int = 0
    faults: list[Fault] = field(default_factory=list)
    episodes: dict[str, dict[int, tuple[int, Trace]]] = field(default_factory=lambda: defaultdict(dict))
    broken: dict[str, None] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()

    def take(self, number: int, line: bytes) -> None:
        self.lines += 1
        try:
            trace = parse(line)
        except BadLine as error:
            self.faults.append(Fault(number, str(error)))
            return
        self.numbers = self.numbers or frozenset(trace.observation)
        if why := self._misfit(trace):
            self.faults.append(Fault(number, why))
            self.broken[trace.episode] = None
            return
        self.episodes[trace.episode][trace.step] = number, trace

    def _misfit(self, trace: Trace) -> str:
        seen = frozenset(trace.observation)
        if seen != self.numbers:
            lacks, has = sorted(self.numbers - seen), sorted(seen - self.numbers)
            return f"observation: lacks {lacks} and has {has} beside those of the first line; log the same"
        if trace.step in self.episodes.get(trace.episode, {}):
            first = self.episodes[trace.episode][trace.step][0]
            return f"step={trace.step} of episode {trace.episode!r} is there already, at line {first}"
        return ""

    def log(self) -> Log:
        whole = []
        for name, steps in self.episodes.items():
            order = sorted(steps)
            absent = next((step for step, found in enumerate(order) if step != found), None)
            if absent is not None:
                line = steps[order[absent]][0]
                why = f"episode {name!r}: step {absent} is missing before step {order[absent]}"
                self.faults.append(Fault(line, why))
                self.broken[name] = None
            elif name not in self.broken:
                whole.append(tuple(steps[step][1] for step in order))
        return Log(
            episodes=tuple(whole),
            faults=tuple(sorted(self.faults, key=lambda fault: fault.line)),
            lines=self.lines,
            broken=tuple(self.broken),
        )


def action_counts(log: Log) -> dict[str, tuple[int, int]]:
    """Return how often each action was done, and how often with success, by name."""
    done = Counter(trace.action for trace in log.traces)
    well = Counter(trace.action for trace in log.traces if trace.result.success)
    return {name: (done[name], well[name]) for name in log.actions}
