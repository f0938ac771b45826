"""The learner's side of the books: every log entry is in one batch or dropped under one named reason.

Counted from entry numbers, independently of the append script (`acked`) and of the log itself
(`resident`). The totals go into every checkpoint and commit; `lineage.jsonl` gets one line per
checkpoint with the range of numbers it added and the exceptions in it, before the commit: a line
whose checkpoint was never committed is not on the chain of parents that an audit follows.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from broker.state import Totals


class Drop(StrEnum):
    """Why an entry of the log was not trained."""

    STALE = "stale"
    INVALID = "invalid"
    NAN = "nan"
    QUARANTINED = "quarantined"
    LOG_LOST = "log_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The three counts, in fragments. `dropped` holds what was lost before it had a number, too."""

    acked: int
    trained: int
    dropped: dict[str, int]
    resident: int

    @property
    def balanced(self) -> bool:
        """Every acknowledged fragment is trained, dropped or still in the log."""
        return self.acked == self.trained + sum(self.dropped.values()) + self.resident


class Ledger:
    """Totals up to `position`, the last entry that is trained or dropped. Used by one thread."""

    def __init__(self, position: int = 0, totals: Totals | None = None) -> None:
        totals = totals or Totals()
        self.position = position
        self.trained = totals.trained
        self.dropped = Counter(totals.dropped)
        self.env_steps = totals.env_steps
        self._exceptions: dict[str, list[int]] = {}
        self._since = position

    def book(self, last: int, *, trained: Collection[int], dropped: Mapping[int, Drop], steps: int) -> None:
        """Move on to `last`. Each number behind the position is in exactly one of the two.

        steps: valid ones of `trained`; only they bring the run nearer to its end.

        Raises RuntimeError otherwise: the books would never balance again.
        """
        named = {*trained, *dropped}
        if len(trained) + len(dropped) != len(named) or named != set(range(self.position + 1, last + 1)):
            raise RuntimeError(
                f"ledger: {len(trained)} trained and {len(dropped)} dropped do not make up "
                f"entries {self.position + 1}..{last}"
            )
        for number, reason in dropped.items():
            self.dropped[reason.value] += 1
            self._exceptions.setdefault(reason.value, []).append(number)
        self.trained += len(trained)
        self.env_steps += steps
        self.position = last

    def totals(self) -> Totals:
        """What a commit carries."""
        return Totals(trained=self.trained, dropped=dict(self.dropped), env_steps=self.env_steps)

    def entry(self, checkpoint_id: str, parent: str) -> "LineageEntry":
        """The line of a checkpoint made now; the next one starts behind it."""
        entry = LineageEntry(
            checkpoint=checkpoint_id,
            parent=parent,
            first=self._since + 1,
            last=self.position,
            trained=self.trained,
            env_steps=self.env_steps,
            exceptions={reason: ranges(numbers) for reason, numbers in self._exceptions.items()},
        )
        self._since, self._exceptions = self.position, {}
        return entry

    def balance(self, *, acked: int, lost: int, resident: int) -> Balance:
        """The books. acked, lost: counted by the append script. resident: by walking the log.

        lost includes numbers behind the position that the log turned out not to hold.
        """
        dropped = Counter(self.dropped)
        if lost:
            dropped[Drop.LOG_LOST.value] += lost
        return Balance(acked=acked, trained=self.trained, dropped=dict(dropped), resident=resident)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """Entries `first`..`last` were consumed between two checkpoints; all but `exceptions` were trained.

    trained, env_steps: totals of the lineage. exceptions: reason → inclusive ranges of numbers.
    """

    checkpoint: str
    parent: str
    first: int
    last: int
    trained: int
    env_steps: int
    exceptions: dict[str, list[tuple[int, int]]]


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Inclusive ranges of rising numbers."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def append_lineage(path: Path, entry: LineageEntry) -> None:
    """Add a line and wait until it is on disk. A torn last line of a crash is ended first."""
    line = json.dumps({name: getattr(entry, name) for name in entry.__slots__}) + "\n"
    with path.open("a+b") as file:
        if file.tell() and _last_byte(path) != b"\n":
            file.write(b"\n")
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
