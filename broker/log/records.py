"""Arguments and results of the store and of the learner's log, as frozen dataclasses.

One run in Redis has two faces: `broker.log.store.Store` for the gRPC services (sessions, Append, Watch,
control) and `broker.log.learner_log.LearnerLog` for the learner (lease, log, publish, commit). A position
is the number of a log entry; 0 is "before the first".
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, IntEnum
from typing import Any, Literal

from broker.log.commands import Answer
from penstock.wire.fragment import FragmentHeader
from penstock.wire.messages import Credit, News, Publication, Report, Role, RunState
from penstock.wire.refusal import Refusal

ControlAction = Literal["pause", "resume", "stop", "checkpoint"]


# ---------------------------------------------------------------- the broker's services


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session that was opened. `specification`: an encoded `RunSpecification`. `waits`: for credit."""

    session: int
    specification: bytes
    seed_salt: int
    credit: Credit
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItem:
    """One checked fragment: its header, the header's bytes as the log stores them, its payload."""

    header: FragmentHeader
    header_bytes: bytes
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Figures of the log at one moment, all from one script."""

    outstanding_steps: int = 0
    settled_steps: int = 0
    log_entries: int = 0
    log_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The reply to an append. `appended` fragments were new (the others were there already).

    `waits`: the session has no credit left, and its turn is to come.
    """

    acked_through: int
    refusal: Refusal | None
    credit: Credit
    appended: int = 0
    waits: bool = False
    gauges: Gauges = field(default_factory=Gauges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The reply to a watch: either news or a refusal.

    `news.weights` is always empty: the caller adds the bytes. `waits`: the session has no credit, and its
    turn is to come.
    """

    news: News | None = None
    refusal: Refusal | None = None
    waits: bool = False


class Scope(IntEnum):
    """Whom a change concerns beside the sessions that it names."""

    NAMED = 0
    """No other session."""
    READY = 1
    """All that do not wait for credit."""
    ALL = 2


@dataclass(frozen=True, slots=True)
class Change:
    """Something was changed that may end a wait: of `sessions` and of `scope`."""

    sessions: tuple[int, ...] = ()
    scope: Scope = Scope.ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """One open session as Redis keeps it."""

    session: int
    actor_id: str
    role: Role
    sequence: int
    begin_through: int
    applied_version: int
    idle_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The run as Redis has it; `run` is empty before a learner took the lease."""

    run: str = ""
    epoch: int = 0
    desired: RunState = RunState.RUNNING
    revision: int = 0
    latest: Publication = field(default_factory=Publication)
    log_head: int = 0
    settled: int = 0
    trim_floor: int = 0
    budget_steps: int = 0
    acked: int = 0
    log_lost: int = 0
    gauges: Gauges = field(default_factory=Gauges)
    sessions: tuple[SessionRow, ...] = ()
    learner_json: str = ""
    closed: bool = False
    max_log_bytes: int = 0
    max_log_entries: int = 0


# ---------------------------------------------------------------- the learner


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
        answers = tuple(map(Answer.from_json, value.get("answers", ())))
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


class Verdict(Enum):
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
