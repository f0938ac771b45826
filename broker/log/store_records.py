"""Arguments and results of `store.Store`, which the gRPC services call: frozen dataclasses.

A position is the number of a log entry; 0 is "before the first".
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from penstock.protocol.fragment import FragmentHeader
from penstock.protocol.messages import Credit, News, Publication, Role, RunState
from penstock.protocol.refusal import Refusal

ControlAction = Literal["pause", "resume", "stop", "checkpoint"]


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
