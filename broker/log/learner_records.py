"""Arguments and results of `learner_log.LearnerLog`, which the learner calls: frozen dataclasses.

A position is the number of a log entry; 0 is "before the first".
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from penstock.broker.log.commands import Answer
from penstock.protocol.fragment import FragmentHeader
from penstock.protocol.messages import Report, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One entry of the log, without its payload.

    number: position. header: None where the entry itself was lost with a Redis that went back in time
    (see `LearnerLog.missing`). steps_total: charges of all entries up to and with this one, in environment
    steps. size: bytes of the payload. held_bytes: what Redis holds for the entry. round: lock-step round, 0
    outside lock-step. actor_id: the actor that appended it (a round is trained in order of actor id).
    """

    number: int
    header: FragmentHeader | None
    steps_total: int
    size: int
    round: int
    actor_id: str = ""
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residue:
    """The part of the log behind a position.

    entries: number of entries there. lost: numbers that Redis has lost.
    """

    entries: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """The limits that admit fragments, in steps, milliseconds and bytes.

    `actor_count` opens lock-step round 0.
    """

    budget: int
    fragment_charge: int
    actor_count: int
    lock_step: bool
    session_timeout_ms: int
    max_log_bytes: int
    max_log_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The learner's side of the accounts along the lineage of one checkpoint."""

    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    env_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint that counts. `position`: last entry it has consumed; `trim`: last entry to forget.

    answers: to commands that it contains and no checkpoint before it does.
    """

    checkpoint_id: str
    manifest_sha256: str
    position: int
    trim: int
    totals: Totals = field(default_factory=Totals)
    answers: tuple[Answer, ...] = ()

    def encode(self) -> str:
        """Return the commit as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, text: str | bytes) -> "Commit":
        """Return the commit of a text that `encode` made.

        Raises ValueError or KeyError for any other text.
        """
        return cls.from_json(json.loads(text))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Commit":
        """Return the commit of a decoded JSON object."""
        answers = tuple(map(Answer.from_json, value["answers"]))
        return cls(**{**value, "totals": Totals(**value["totals"]), "answers": answers})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The state that opens a log again, from the learner's memory or from a checkpoint.

    number, steps_total: newest entry the learner has read and its running total.
    sequences: session → highest sequence read. reports: newest report read.
    """

    run: str
    epoch: int = 0
    session: int = 0
    version: int = 0
    number: int = 0
    steps_total: int = 0
    settled: int = 0
    trim_floor: int = 0
    log_lost: int = 0
    reports: int = 0
    round: int = -1
    revision: int = 0
    command: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    commits: tuple[Commit, ...] = ()
    specification: bytes = b""

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object for a checkpoint's manifest."""
        return {
            **asdict(self),
            "sequences": {str(session): last for session, last in self.sequences.items()},
            "commits": [asdict(commit) for commit in self.commits],
            "specification": self.specification.hex(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "LogState":
        """Return the state of an object that `to_json` made."""
        return cls(
            **{
                **value,
                "sequences": {int(session): last for session, last in value["sequences"].items()},
                "commits": tuple(Commit.from_json(commit) for commit in value["commits"]),
                "specification": bytes.fromhex(value["specification"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write, as `acquire` gives it.

    fresh: Redis held no run. closed: the log waits for `start` or `reopen`. committed: oldest first.
    trim_floor: newest entry that was removed on purpose; a start behind it loses experience.
    """

    epoch: int
    fresh: bool
    closed: bool
    committed: tuple[Commit, ...] = ()
    trim_floor: int = 0
    version: int = 0
    head: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """The newest answer of one session to the run's probe. `log_prob` float32 [P]."""

    session: int
    actor_id: str
    version: int
    sha256: str
    log_prob: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """The state that renewing the lease returns.

    `outstanding` in steps; `closed`: call `reopen` before any write.
    """

    desired: RunState
    revision: int
    checkpoint_revision: int
    closed: bool
    log_bytes: int
    log_entries: int
    head: int
    outstanding: int
    settled: int
    settled_steps: int
    acked: int
    log_lost: int
    evaluate_version: int
    rollout_sessions: int
    expired_sessions: int = 0
    probes: tuple[ProbeAnswer, ...] = ()


class MissingReason(Enum):
    """The reason for which an entry or its payload is missing."""

    EPOCH_LOST = "epoch_lost"
    """Another learner has the lease: exit."""
    TRIMMED = "trimmed"
    """At or below the trim floor: a programming error."""
    LOG_LOST = "log_lost"
    """Lost with Redis: count it as lost, settle it, go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """One report of episodes; `number` is its place in the order of arrival."""

    number: int
    actor_id: str
    report: Report
