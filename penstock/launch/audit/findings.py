"""The result of an audit: problems of a few kinds, and the account of all fragments."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from penstock.launch.audit.ranges import Ranges


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding. session, first, last: the fragments it concerns; session 0: it concerns no fragments."""

    kind: Kind
    what: str
    session: int = 0
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        """Return a line of the list."""
        if not self.session:
            return f"{self.kind}: {self.what}"
        sequences = f"{self.first}" if self.first == self.last else f"{self.first}..{self.last}"
        return f"{self.kind}: session {self.session}, sequence {sequences}: {self.what}"


def problems_of(kind: Kind, session: int, ranges: Ranges, what: str) -> Iterable[Problem]:
    """Yield one problem for each range of sequence numbers."""
    return (Problem(kind=kind, session=session, first=first, last=last, what=what) for first, last in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The result of the whole audit.

    sources: the records that were found, and their state. fragments: place → number, over all fragments that
    log and lineage name. journalled: the same over all fragments that actors recorded; empty without
    journals. sampled: what servers drew, runs of tokens by what became of them; empty without their records.
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
        """Return True when nothing is lost, doubled or unaccounted."""
        return not self.problems

    def tally(self) -> dict[str, int]:
        """Return kind → number of problems."""
        return {kind.value: sum(one.kind is kind for one in self.problems) for kind in Kind}

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "run": self.run,
            "clean": self.clean,
            "sources": self.sources,
            "fragments": self.fragments,
            "journalled": self.journalled,
            "sampled": self.sampled,
            "counters": self.counters,
            "tally": self.tally(),
            "problems": [asdict(problem) for problem in self.problems],
        }
