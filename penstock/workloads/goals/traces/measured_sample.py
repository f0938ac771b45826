"""What of a log an environment holds: all of it, or a sample of its episodes where it is large."""

from pathlib import Path
from typing import Final

from penstock.workloads.goals.traces.trace_index import TraceIndex
from penstock.workloads.goals.traces.trace_line import parse

MOST_HELD: Final = 100_000
"""Decisions that an environment holds in memory, some 4 kB each."""


def write_sample(index: TraceIndex, path: Path) -> int:
    """Write every n-th whole episode, n such that they have at most MOST_HELD decisions or are one episode.

    Returns how many episodes were written.
    """
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
