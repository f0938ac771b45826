"""A log read as a whole and held in memory: its episodes, and every fault with the number of its line.

A log of any size is read by `trace_index`, which this is made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.traces.trace_index import Fault, TraceIndex
from penstock.workloads.goals.traces.trace_line import Trace, parse

MOST_LINES: Final = 500_000
"""Lines of one file: a log is held in memory, some 4 kB a line."""


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
        return tuple(trace for episode in self.episodes for trace in episode)

    @property
    def independent(self) -> bool:
        return all(len(episode) == 1 for episode in self.episodes)

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(sorted({trace.action for trace in self.traces}))

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(sorted(self.episodes[0][0].observation)) if self.episodes else ()


def read_log(path: Path) -> Log:
    with TraceIndex.of(path, MOST_LINES) as index:
        return _held(index)


def need_episodes(path: Path) -> Log:
    """Return what a file holds; raises ConfigurationError where it holds no whole episode."""
    with TraceIndex.of(path, MOST_LINES) as index:
        index.check_episodes()
        return _held(index)


def _held(index: TraceIndex) -> Log:
    return Log(
        episodes=tuple(_by_episode(index.traces())),
        faults=tuple(index.faults),
        lines=index.lines,
        broken=tuple(index.broken),
    )


def _by_episode(traces: Iterator[Trace]) -> Iterator[tuple[Trace, ...]]:
    kept: list[Trace] = []
    for trace in traces:
        if not trace.step and kept:
            yield tuple(kept)
            kept = []
        kept.append(trace)
    if kept:
        yield tuple(kept)


def shared_episodes(path: Path) -> Log:
    """Return what `need_episodes` does, read once per process while the file is the same."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    return _shared(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1)
def _shared(path: Path, _inode: int, _changed: int, _size: int) -> Log:
    return need_episodes(path)


# ---- What of a log an environment holds: all of it, or a sample of its episodes where it is large.

MOST_HELD: Final = 100_000
"""Decisions that an environment holds in memory, some 4 kB each."""


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
