"""The learner's books of log entries, and the progress of a run, as checkpoints hold both.

Every log entry is in one batch or dropped under one named reason, counted from entry numbers, independently
of the append script and of the log itself. `lineage.jsonl` gets one line per checkpoint, before its commit.
`penstock audit` follows the chain of parents from the newest commit, which skips lines never committed.
"""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

from pydantic import ValidationError

from penstock.broker.log.replies import LogState, Totals
from penstock.config.settings import ConfigurationError, EnvironmentSection, PolicySection, Section, Settings


class Drop(StrEnum):
    """Why an entry of the log was not trained."""

    STALE = "stale"
    INVALID = "invalid"
    NAN = "nan"
    QUARANTINED = "quarantined"
    LOG_LOST = "log_lost"
    RESTORED = "restored"
    """Generated with weights from before a restore."""


DIGEST_BYTES: Final = 8
"""Bytes of a payload's SHA-256 in the lineage: enough to find an accidental change."""

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Origin:
    """The sender of an entry. digest: first DIGEST_BYTES of its payload's SHA-256; b"" when not taken."""

    session: int
    sequence: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The three counts, in fragments. dropped: with those that were lost before they had a number."""

    acked: int
    trained: int
    dropped: dict[str, int]
    resident: int

    @property
    def balanced(self) -> bool:
        return self.acked == self.trained + sum(self.dropped.values()) + self.resident


class Ledger:
    """Totals up to `position`, the last entry that is trained or dropped. Used by one thread.

    round: next one of lock-step. recorded: batches and events consumed of a recording. restored_from:
    experience of older versions is dropped; 0: none is.
    """

    def __init__(self, position: int = 0, totals: Totals | None = None) -> None:
        totals = totals or Totals()
        self.position = position
        self.round = self.recorded = self.restored_from = 0
        self.trained = totals.trained
        self.dropped = Counter(totals.dropped)
        self.env_steps = totals.env_steps
        self._since = position
        self._begin_line()

    def book(
        self,
        last: int,
        *,
        trained: Collection[int],
        dropped: Mapping[int, Drop],
        steps: int,
        origins: Mapping[int, Origin] | None = None,
    ) -> None:
        """Move the position to `last`; each number up to it must be in one of `trained` and `dropped`.

        steps: valid ones of `trained`. origins: by number; an entry that was lost whole has none. Raises
        RuntimeError otherwise: the books would never balance again.
        """
        named = {*trained, *dropped}
        if len(trained) + len(dropped) != len(named) or named != set(range(self.position + 1, last + 1)):
            raise RuntimeError(
                f"ledger: {len(trained)} trained and {len(dropped)} dropped do not make up "
                f"entries {self.position + 1}..{last}"
            )
        origins = origins or {}
        for number, reason in dropped.items():
            self.dropped[reason.value] += 1
            self._exceptions.setdefault(reason.value, []).append(number)
            if number in origins:
                origin = origins[number]
                self._left_out[reason.value][origin.session].append(origin.sequence)
        for number in trained:
            if number in origins:
                self._sessions[origins[number].session].append(origins[number])
        self.trained += len(trained)
        self.env_steps += steps
        self.position = last

    def give_up(self, last: int) -> None:
        """Book everything up to `last` as lost, for a resume with --allow-loss."""
        numbers = range(self.position + 1, last + 1)
        self._given_up.append((numbers.start, last))
        self.book(last, trained=(), dropped=dict.fromkeys(numbers, Drop.LOG_LOST), steps=0)

    def fraction_of(self, total_steps: int | None) -> float:
        return 0.0 if total_steps is None else min(1.0, self.env_steps / total_steps)

    def totals(self) -> Totals:
        return Totals(trained=self.trained, dropped=dict(self.dropped), env_steps=self.env_steps)

    def entry(self, checkpoint_id: str, parent: str, version: int = 0) -> "LineageEntry":
        """Return the line of a checkpoint made now, and begin the next. version: newest published."""
        sent = {session: sorted(of, key=lambda one: one.sequence) for session, of in self._sessions.items()}
        entry = LineageEntry(
            checkpoint=checkpoint_id,
            parent=parent,
            first=self._since + 1,
            last=self.position,
            trained=self.trained,
            env_steps=self.env_steps,
            exceptions={reason: ranges(numbers) for reason, numbers in self._exceptions.items()},
            version=version,
            sessions={str(session): ranges([one.sequence for one in of]) for session, of in sent.items()},
            left_out={
                reason: {str(session): ranges(sequences) for session, sequences in of.items()}
                for reason, of in self._left_out.items()
            },
            digests={
                str(session): "".join(one.digest.hex() for one in of)
                for session, of in sent.items()
                if all(one.digest for one in of)
            },
            given_up=self._given_up,
        )
        self._since = self.position
        self._begin_line()
        return entry

    def _begin_line(self) -> None:
        self._given_up: Ranges = []
        self._exceptions: dict[str, list[int]] = {}
        self._sessions: defaultdict[int, list[Origin]] = defaultdict(list)
        self._left_out: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))

    def balance(self, *, acked: int, lost: int, resident: int) -> Balance:
        """Return the books. acked, lost: counted by the append script. resident: counted in the log.

        lost includes numbers after the position that the log does not hold.
        """
        dropped = Counter(self.dropped)
        if lost:
            dropped[Drop.LOG_LOST.value] += lost
        return Balance(acked=acked, trained=self.trained, dropped=dict(dropped), resident=resident)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """Entries `first`..`last` were consumed between two checkpoints; all but `exceptions` were trained.

    trained, env_steps: totals of the lineage. exceptions: reason → inclusive ranges of numbers.
    version: newest published. sessions: session → inclusive ranges of the sequence numbers trained.
    left_out: reason → the same of those dropped; an entry lost whole is in `exceptions` only.
    digests: session → hex of DIGEST_BYTES for each trained, in order of sequence; where they were taken.
    given_up: ranges of entries that a resume with --allow-loss gave up; a line off the chain names them.
    """

    checkpoint: str
    parent: str
    first: int
    last: int
    trained: int
    env_steps: int
    exceptions: dict[str, Ranges]
    version: int = 0
    sessions: dict[str, Ranges] = field(default_factory=dict)
    left_out: dict[str, dict[str, Ranges]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    given_up: Ranges = field(default_factory=list)


def ranges(numbers: Sequence[int]) -> Ranges:
    found: Ranges = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def open_at_line(path: Path) -> BinaryIO:
    """Open a file of lines to append to it; a last line that a crash has torn is ended first."""
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def append_lineage(path: Path, entry: LineageEntry) -> None:
    """Append a line and wait until it is on disk."""
    line = json.dumps({name: getattr(entry, name) for name in entry.__slots__}) + "\n"
    with open_at_line(path) as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


# ---- The progress of a run: what a checkpoint holds in addition to the algorithm's state, as JSON.


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """position: last log entry consumed. round: next one of lock-step. episodes: `Episodes.state()`.

    numbers: of the `AlgorithmState`. evaluation: `Evaluation.state()`. recorded: batches
    consumed of the recording that the run learns from. staleness: fragments by age in updates. sections: what
    must not change between stop and resume, as canonical JSON. training_seconds: since the first experience.
    publications: of weights, by all learners of the run.
    restored_from: oldest version whose experience is learned from. commands: `CommandRecord.state()`.
    quarantine: `Quarantine.state()`.
    """

    run: str
    sections: dict[str, str]
    position: int = 0
    round: int = 0
    updates: int = 0
    training_seconds: float = 0.0
    publications: int = 0
    totals: Totals = field(default_factory=Totals)
    episodes: dict[str, Any] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    recorded: int = 0
    restored_from: int = 0
    commands: dict[str, Any] = field(default_factory=dict)
    quarantine: dict[str, Any] = field(default_factory=dict)
    log: LogState | None = None

    def ledger(self) -> Ledger:
        ledger = Ledger(self.position, self.totals)
        ledger.round, ledger.recorded, ledger.restored_from = self.round, self.recorded, self.restored_from
        return ledger

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "log": None if self.log is None else self.log.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Progress":
        """Raises TypeError or KeyError for another shape."""
        log = value["log"]
        return cls(
            **{
                **value,
                "totals": Totals(**value["totals"]),
                "log": None if log is None else LogState.from_json(log),
            }
        )


_NETWORK: Final = ("workload", "environment", "policy")


def sections(settings: Settings) -> dict[str, str]:
    """Return the settings that decide the meaning of weights and fragments, as canonical JSON by section."""
    return {
        "workload": settings.workload,
        "environment": settings.environment.canonical_json(),
        # The initialisation means nothing for weights of a checkpoint.
        "policy": settings.policy.canonical_json(exclude={"initialisation"}),
        "actor.unroll_length": str(settings.actor.unroll_length),
        "algorithm.name": settings.algorithm.name,
    }


def configuration_hash(settings: Settings) -> str:
    """Return the SHA-256 of the run's configuration without security, metrics and the address of Redis."""
    content = settings.model_dump(
        mode="json", exclude={"security": True, "metrics": True, "broker": {"redis"}}
    )
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_network(run: str, before: dict[str, str], now: dict[str, str]) -> None:
    """Raise ConfigurationError for two runs whose networks or spaces differ; it names the section."""
    check_same(run, before, {name: text for name, text in now.items() if name in _NETWORK})


_PARSED: Final[Mapping[str, type[Section]]] = {"environment": EnvironmentSection, "policy": PolicySection}


def _is_alike(name: str, before: str | None, now: str) -> bool:
    """Return whether two texts of a section mean the same; a setting that is in one alone has its default."""
    kind = _PARSED.get(name)
    if before == now or before is None or kind is None:
        return before == now
    try:
        return kind.model_validate_json(before) == kind.model_validate_json(now)
    except ValidationError:
        return False


def check_same(run: str, before: dict[str, str], now: dict[str, str]) -> None:
    """Raise ConfigurationError for sections that changed since the checkpoint; it names the first."""
    for name, text in now.items():
        if not _is_alike(name, before.get(name), text):
            key, began, here = _first_difference(name, before.get(name), text)
            raise ConfigurationError(
                f"{key}={here}: run {run!r} was begun with {began}; resume it with the same, or start a new "
                "run"
            )


def _first_difference(name: str, before: str | None, now: str) -> tuple[str, str | None, str]:
    """Return the first setting in which two texts of a section differ, and both values."""
    try:
        began, here = json.loads(before or ""), json.loads(now)
    except ValueError:
        return name, before, now
    if isinstance(began, dict) and isinstance(here, dict):
        # What one side lacks has its default there: what both state differs first.
        for key in (*sorted(began.keys() & here.keys()), *sorted(began.keys() ^ here.keys())):
            if began.get(key) != here.get(key):
                parts = (json.dumps(side.get(key)) for side in (began, here))
                return _first_difference(f"{name}.{key}", *parts)
    return name, before, now
