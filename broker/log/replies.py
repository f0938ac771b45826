"""Convert the scripts' replies, lists of bytes and integers, to dataclasses and refusals.

The place of every value is documented at the head of the script that sends it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum, IntEnum
from typing import Any, Final, Literal

from penstock.broker.log.script import LAYOUT, entry_bytes
from penstock.protocol.fragment import FragmentHeader, parse_header
from penstock.protocol.messages import Credit, News, Publication, Report, Role, RunState
from penstock.protocol.refusal import Reason, Refusal

# ---- Commands of operators that the learner answers, as they are kept in Redis.

CommandAction = Literal["checkpoint", "flush", "restore"]


class CommandRefusal(IntEnum):
    """The reason why a command was not done; same numbers as `penstock.v1.CommandRefusal`."""

    UNSUPPORTED = 1
    TOO_FEW_STEPS = 2
    NAME = 3
    MISMATCH = 4
    LIMIT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a command.

    refusal: why it was not done; 0: done. detail: the same in words. checkpoint_id: the checkpoint that
    contains the result. version: number under which restored weights were published. steps: of a flush,
    taken or pending.
    """

    number: int
    request_id: str
    detail: str
    refusal: int = 0
    checkpoint_id: str = ""
    version: int = 0
    steps: int = 0

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as Redis keeps it.

    argument: name of a checkpoint, "" for none; of a flush the fewest steps, in decimal.
    through: newest log entry that a flush takes; None: not decided yet. answer: None while it is pending.
    """

    number: int
    request_id: str
    action: CommandAction
    argument: str
    through: int | None = None
    answer: Answer | None = None

    @classmethod
    def from_reply(cls, reply: Sequence[Any]) -> "Command":
        """Convert a command of a script's reply: number, request id, action, argument, through, answer."""
        number, request_id, action, argument, through, answer = reply
        return cls(
            number=int(number),
            request_id=request_id.decode(),
            action=action.decode(),
            argument=argument.decode(),
            through=int(through) if through else None,
            answer=Answer(**json.loads(answer)) if answer else None,
        )


# ---- Arguments and results of `learner_log.LearnerLog`, which the learner calls: frozen dataclasses.


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
    """The part of the log behind a position: entries there, and numbers that Redis has lost."""

    entries: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Limits that admit fragments, in steps, ms and bytes. `actor_count` opens lock-step round 0."""

    budget: int
    fragment_charge: int
    actor_count: int
    lock_step: bool
    session_timeout_ms: int
    max_log_bytes: int
    max_log_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The learner's counts of steps along the lineage of one checkpoint."""

    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    env_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint. position: last entry consumed; trim: last to forget; answers: to commands new in it."""

    checkpoint_id: str
    manifest_sha256: str
    position: int
    trim: int
    totals: Totals = field(default_factory=Totals)
    answers: tuple[Answer, ...] = ()

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, text: str | bytes) -> "Commit":
        """Return the commit of a text that `encode` made; raises ValueError or KeyError for another."""
        return cls.from_json(json.loads(text))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Commit":
        answers = tuple(Answer(**answer) for answer in value["answers"])
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
        return cls(
            **{
                **value,
                "sequences": {int(session): last for session, last in value["sequences"].items()},
                "commits": tuple(Commit.from_json(commit) for commit in value["commits"]),
                "specification": bytes.fromhex(value["specification"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write, as `acquire` gives it; the fields come as in the reply.

    fresh: Redis held no run. closed: the log waits for `start` or `reopen`. committed: oldest first.
    trim_floor: newest entry that was removed on purpose; a start behind it loses experience.
    """

    epoch: int
    fresh: bool
    closed: bool
    trim_floor: int = 0
    version: int = 0
    head: int = 0
    committed: tuple[Commit, ...] = ()


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
    """What `renew` returns, in this order. outstanding: steps. closed: call `reopen` before a write."""

    closed: bool
    desired: RunState
    revision: int
    checkpoint_revision: int
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


# ---- Arguments and results of `store.Store`, which the gRPC services call: frozen dataclasses.

ControlAction = Literal["pause", "resume", "stop", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session that was opened. specification: encoded `RunSpecification`. waits: for credit."""

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
class Appended:
    """The reply to an append. appended: new fragments. waits: whether the session waits for credit."""

    acked_through: int
    refusal: Refusal | None
    credit: Credit
    appended: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Either news, to which the caller adds `weights`, or a refusal. waits: whether it waits for credit."""

    news: News | None = None
    refusal: Refusal | None = None
    waits: bool = False


class Scope(IntEnum):
    """The sessions that a change concerns in addition to those that it names."""

    NAMED = 0
    """No other session."""
    READY = 1
    """All that do not wait for credit."""
    ALL = 2


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the run that may end a wait of `sessions`, and of the sessions of `scope`."""

    sessions: tuple[int, ...] = ()
    scope: Scope = Scope.ALL


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One open session as Redis keeps it; the fields come as in the reply."""

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
    outstanding_steps: int = 0
    settled_steps: int = 0
    log_entries: int = 0
    log_bytes: int = 0
    sessions: tuple[SessionRow, ...] = ()
    learner_json: str = ""
    closed: bool = False
    max_log_bytes: int = 0
    max_log_entries: int = 0


_RETRY_AFTER_MS: Final = {
    "closed": 500,
    "log_bytes": 200,
    "log_entries": 200,
    "staging": 200,
    "pacing": 50,
    "sessions": 1000,
}
_NOT_READY_RETRY_MS: Final = 100
_BUSY_RETRY_MS: Final = 1000
_DETAILS: Final = {
    "closed": "closed: the log waits for the learner to re-open it",
    "log_bytes": "log_bytes: the log is at its ceiling of bytes until the learner commits",
    "log_entries": "log_entries: the log is at its ceiling of entries until the learner commits",
    "staging": "staging: the payload could not be staged (Redis at maxmemory, or it took too long)",
    "sessions": "sessions: as many are open as one run may have; those that say nothing are closed in time",
    "pacing": "pacing: enough experience is waiting for the learner",
}


def refusal(status: bytes, detail: str, acked_through: int = 0) -> Refusal | None:
    """Return the refusal of a script's status, None for OK."""
    if status == b"OK":
        return None
    reason = Reason[status.decode()]
    match reason:
        case Reason.FULL:
            return Refusal(reason=reason, detail=_DETAILS[detail], retry_after_ms=_RETRY_AFTER_MS[detail])
        case Reason.GAP:
            return Refusal(reason=reason, expected=acked_through + 1)
        case Reason.NOT_READY:
            return Refusal(reason=reason, detail=detail, retry_after_ms=_NOT_READY_RETRY_MS)
        case Reason.EXPIRED:
            return Refusal(reason=reason, detail="the session is unknown or closed; open a new one")
        case Reason.FENCED:
            return Refusal(reason=reason, detail="a newer session of the same actor has taken over")
        case _:
            return Refusal(reason=reason, detail=detail)


def opened(reply: Sequence[Any]) -> Opened | Refusal:
    """Convert the reply of `open_session.lua`."""
    refused = refusal(reply[0], _text(reply[1]) if reply[0] != b"OK" else "")
    if refused is not None:
        return refused
    session, salt, through, version, round_ = (int(value) for value in reply[1:6])
    return Opened(
        session=session,
        seed_salt=salt,
        credit=Credit(through, version, round_),
        specification=bytes(reply[6]),
        waits=bool(reply[7]),
    )


def appended(reply: Sequence[Any]) -> Appended:
    acked, new, through, version, round_ = map(int, reply[2:7])
    return Appended(
        acked_through=acked,
        refusal=refusal(reply[0], _text(reply[1]), acked),
        credit=Credit(through, version, round_),
        appended=new,
        waits=bool(reply[11]),
    )


def reported(reply: Sequence[Any]) -> tuple[int, Refusal | None]:
    """Convert the reply of `report.lua`: (last report taken, refusal of the next one or None)."""
    taken = int(reply[1])
    return taken, refusal(reply[0], _text(reply[2]), taken)


def watched(reply: Sequence[Any]) -> Watched:
    refused = refusal(reply[0], _text(reply[1]) if reply[0] != b"OK" else "")
    if refused is not None:
        return Watched(refusal=refused)
    through, minimum, round_, desired, revision, traffic, evaluate = map(int, reply[1:8])
    news = News(
        latest=Publication(int(reply[8]), int(reply[9]), _text(reply[10]), int(reply[11])),
        credit=Credit(through, minimum, round_),
        state=RunState(desired or 1),
        revision=revision,
        traffic_revision=traffic,
        scalars=json.loads(reply[12]) if reply[12] else {},
        evaluate_version=evaluate,
        flush=int(reply[14]),
    )
    return Watched(news=news, waits=bool(reply[13]))


def change(text: bytes) -> Change:
    """Convert a message of the channel CHANGED; a message of unknown form concerns all sessions."""
    first, *others = text.decode(errors="replace").split(" ")
    scope = Scope.READY if first == "+" else Scope.NAMED
    names = [name for name in (first, *others) if name not in ("", "+")]
    if not first or not all(name.isdecimal() for name in names):
        return Change()
    return Change(tuple(map(int, names)), scope)


def publication(version: int, value: bytes) -> Publication:
    """Convert a value of the hash PUBLICATIONS: "update sha256 size chunks"."""
    update, sha256, size, _chunks = value.decode().split(" ")
    return Publication(version, int(update), sha256, int(size))


def status(reply: Sequence[Any]) -> Status:
    closed, outstanding, entries, learner, flat, rows = reply
    state = {_text(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}

    def number(name: str) -> int:
        return int(state.get(name, 0))

    same = "epoch revision settled settled_steps trim_floor acked log_lost log_bytes max_log_bytes"
    return Status(
        **{name: number(name) for name in same.split()},
        run=_text(state.get("run", b"")),
        desired=RunState(number("desired") or 1),
        latest=Publication(
            number("version"), number("update"), _text(state.get("sha256", b"")), number("size")
        ),
        log_head=number("number"),
        budget_steps=number("budget"),
        outstanding_steps=int(outstanding),
        log_entries=int(entries),
        max_log_entries=number("max_log_entries"),
        sessions=tuple(_session(row) for row in rows),
        learner_json=_text(learner),
        closed=bool(closed),
    )


def _session(row: Sequence[Any]) -> SessionRow:
    session, actor_id, role, *numbers = row
    return SessionRow(int(session), _text(actor_id), Role(int(role)), *map(int, numbers))


def lease(reply: Sequence[Any]) -> Lease:
    """Convert the reply of `acquire.lua` with status OK."""
    epoch, fresh, closed, floor, version, head = map(int, reply[1:7])
    return Lease(epoch, bool(fresh), bool(closed), floor, version, head, tuple(map(Commit.decode, reply[7])))


def renewal(reply: Sequence[Any]) -> Renewal:
    numbers = [item.name for item in fields(Renewal)][:-1]
    values: dict[str, Any] = dict(zip(numbers, map(int, reply[1:16]), strict=True))
    values |= {"closed": bool(values["closed"]), "desired": RunState(values["desired"] or 1)}
    flat = reply[16]
    return Renewal(**values, probes=tuple(_probe(*flat[i : i + 3]) for i in range(0, len(flat), 3)))


def _probe(session: bytes, actor: bytes, answer: bytes) -> ProbeAnswer:
    version, sha256, log_prob = json.loads(answer)
    return ProbeAnswer(
        session=int(session), actor_id=_text(actor), version=version, sha256=sha256, log_prob=tuple(log_prob)
    )


def log_entry(entry_id: bytes, values: Mapping[bytes, bytes]) -> LogEntry:
    """Convert one entry of the stream LOG; an empty header marks the end of a hole."""
    return LogEntry(
        number=int(entry_id.partition(b"-")[0]),
        header=parse_header(values[b"h"]) if values[b"h"] else None,
        steps_total=int(values[b"t"]),
        size=int(values[b"z"]),
        held_bytes=entry_bytes(int(values[b"z"]), len(values[b"h"])),
        round=int(values[b"r"]),
        actor_id=_text(values.get(b"a", b"")),
    )


def report_entry(entry_id: bytes, values: Mapping[bytes, bytes]) -> ReportEntry:
    return ReportEntry(
        number=int(entry_id.partition(b"-")[0]),
        actor_id=_text(values[b"a"]),
        report=Report.decode(values[b"b"]),
    )


def command_refusal(reply: Sequence[Any], request_id: str) -> Refusal:
    """Convert the reply of `command.lua` with any status but OK."""
    match reply[0]:
        case b"OTHER":
            other = f"{_text(reply[1])} {_text(reply[2])}".strip()
            detail = f"request_id={request_id!r} names another command ({other}); draw another id"
            return Refusal(reason=Reason.INVALID, detail=detail)
        case b"BUSY":
            detail = f"commands: {int(reply[1])} wait for the learner; is it running?"
            return Refusal(reason=Reason.FULL, detail=detail, retry_after_ms=_BUSY_RETRY_MS)
        case _:
            return Refusal(reason=Reason.NOT_READY, detail="no learner has taken the run yet")


def _text(value: bytes) -> str:
    return value.decode()


# ---- The envelope of every script's reply: the layout of the keys, and the incarnation of the run.


class OtherLayout(Exception):
    """The run in Redis has keys of another layout; the message names both and the remedy."""

    def __init__(self, layout: int) -> None:
        super().__init__(
            f"the run in Redis has layout {layout}, this release has layout {LAYOUT}: "
            "start brokers and learner of one release, the learner first"
        )
        self.is_earlier = layout < LAYOUT
        """A learner of this release brings it up to date."""


class OtherIncarnation(Exception):
    """The script did not run: the caller knows another incarnation than Redis holds; "": none is opened."""

    def __init__(self, incarnation: str) -> None:
        super().__init__("Redis holds another incarnation of the run than a moment ago: ask again")
        self.incarnation = incarnation


def unpack(answer: Sequence[Any]) -> tuple[str, Any]:
    """Return the incarnation and the script's own reply; raises OtherLayout and OtherIncarnation."""
    layout, incarnation = int(answer[0]), bytes(answer[1]).decode()
    if len(answer) > 2:
        return incarnation, answer[2]
    if layout != LAYOUT:
        raise OtherLayout(layout)
    raise OtherIncarnation(incarnation)
