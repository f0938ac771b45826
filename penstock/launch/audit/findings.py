"""The result of an audit: problems of a few kinds, and the account of all fragments."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

# ---- Sets of numbers as inclusive ranges: a session's sequence numbers are dense, so few ranges hold many.

Range = tuple[int, int]
Ranges = list[Range]
"""Rising, disjoint and not touching, as `merge` makes them."""


def merge(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return the numbers in any of `ranges`."""
    merged: Ranges = []
    for first, last in sorted((first, last) for first, last in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def of_numbers(numbers: Iterable[int]) -> Ranges:
    return merge((number, number) for number in numbers)


def overlaps(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return the numbers that are in more than one of `ranges`."""
    found: Ranges = []
    reached = 0
    for first, last in sorted((first, last) for first, last in ranges):
        if found_last := min(last, reached) if first <= reached else 0:
            found.append((first, found_last))
        reached = max(reached, last)
    return merge(found)


def subtract(ranges: Ranges, other: Ranges) -> Ranges:
    """Return the numbers in `ranges` that are not in `other`."""
    left: Ranges = []
    at = 0
    for first, last in ranges:
        begin = first
        while at < len(other) and other[at][1] < begin:
            at += 1
        index = at
        while index < len(other) and other[index][0] <= last:
            if other[index][0] > begin:
                left.append((begin, other[index][0] - 1))
            begin = other[index][1] + 1
            index += 1
        if begin <= last:
            left.append((begin, last))
    return left


def intersect(ranges: Ranges, other: Ranges) -> Ranges:
    return subtract(ranges, subtract(ranges, other))


def count(ranges: Iterable[Sequence[int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def numbers(ranges: Iterable[Sequence[int]]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last + 1)


class Kind(StrEnum):
    """The kind of a problem."""

    LOST = "lost"
    """Acknowledged, and nowhere to be found."""
    DOUBLED = "doubled"
    """Used, stored or acknowledged twice, or the same experience under two names."""
    UNACCOUNTED = "unaccounted"
    """Records that contradict one another or are missing."""
    CHANGED = "changed"
    """A payload that is not the one acknowledged."""
    ORDER = "order"
    """A number that only rises went back, or was used twice."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. session, first, last: the fragments it concerns; session 0: it concerns no fragments."""

    kind: Kind
    what: str
    session: int = 0
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        if not self.session:
            return f"{self.kind}: {self.what}"
        sequences = f"{self.first}" if self.first == self.last else f"{self.first}..{self.last}"
        return f"{self.kind}: session {self.session}, sequence {sequences}: {self.what}"


def problem_at(kind: Kind, session: int, sequence: int, what: str) -> Problem:
    return Problem(kind, what, session, sequence, sequence)


def problems_of(kind: Kind, session: int, ranges: Ranges, what: str) -> Iterable[Problem]:
    return (Problem(kind, what, session, first, last) for first, last in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The result of the whole audit.

    sources: the records that were found, and their state. fragments: place → number, over all fragments that
    log and lineage name. journalled: the same over all fragments that actors recorded; empty without
    journals. sampled: what servers drew, runs of tokens by their outcome; empty without their records.
    """

    run: str
    sources: dict[str, str]
    fragments: dict[str, int]
    journalled: dict[str, int]
    sampled: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.problems

    def tally(self) -> dict[str, int]:
        """Return kind → number of problems."""
        return {kind.value: sum(one.kind is kind for one in self.problems) for kind in Kind}

    def to_json(self) -> dict[str, Any]:
        content = {"run": self.run, "clean": self.clean} | asdict(self)
        problems = content.pop("problems")
        return content | {"tally": self.tally(), "problems": problems}
