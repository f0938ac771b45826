"""Convert the scripts' replies, lists of bytes and integers, to dataclasses and refusals.

The place of every value is documented at the head of the script that sends it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.broker.log.entry_memory import entry_bytes
from penstock.broker.log.learner_records import Commit, Lease, LogEntry, ProbeAnswer, Renewal, ReportEntry
from penstock.broker.log.store_records import (
    Appended,
    Change,
    Gauges,
    Opened,
    Scope,
    SessionRow,
    Status,
    Watched,
)
from penstock.protocol.fragment import parse_header
from penstock.protocol.messages import Credit, News, Publication, Report, Role, RunState
from penstock.protocol.refusal import Reason, Refusal

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
    """Convert the reply of `append.lua`."""
    acked, new, through, version, round_, outstanding, settled, entries, size = map(int, reply[2:11])
    return Appended(
        acked_through=acked,
        refusal=refusal(reply[0], _text(reply[1]), acked),
        credit=Credit(through, version, round_),
        appended=new,
        waits=bool(reply[11]),
        gauges=Gauges(
            outstanding_steps=outstanding, settled_steps=settled, log_entries=entries, log_bytes=size
        ),
    )


def reported(reply: Sequence[Any]) -> tuple[int, Refusal | None]:
    """Convert the reply of `report.lua`: (last report taken, refusal of the next one or None)."""
    taken = int(reply[1])
    return taken, refusal(reply[0], _text(reply[2]), taken)


def watched(reply: Sequence[Any]) -> Watched:
    """Convert the reply of `watch.lua`."""
    refused = refusal(reply[0], _text(reply[1]) if reply[0] != b"OK" else "")
    if refused is not None:
        return Watched(refusal=refused)
    through, minimum, round_, desired, revision, traffic, evaluate = map(int, reply[1:8])
    news = News(
        latest=Publication(int(reply[8]), int(reply[9]), _text(reply[10]), int(reply[11])),
        credit=Credit(through, minimum, round_),
        state=_desired(desired),
        revision=revision,
        traffic_revision=traffic,
        scalars=json.loads(reply[12]) if reply[12] else {},
        evaluate_version=evaluate,
        flush=int(reply[14]),
    )
    return Watched(news=news, waits=bool(reply[13]))


def change(text: bytes) -> Change:
    """Convert a message of the channel CHANGED; whatever is not understood concerns everybody."""
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
    """Convert the reply of `status.lua`."""
    closed, outstanding, entries, learner, flat, rows = reply
    state = {_text(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}

    def number(name: str) -> int:
        return int(state.get(name, 0))

    return Status(
        run=_text(state.get("run", b"")),
        epoch=number("epoch"),
        desired=_desired(number("desired")),
        revision=number("revision"),
        latest=Publication(
            number("version"), number("update"), _text(state.get("sha256", b"")), number("size")
        ),
        log_head=number("number"),
        settled=number("settled"),
        trim_floor=number("trim_floor"),
        budget_steps=number("budget"),
        acked=number("acked"),
        log_lost=number("log_lost"),
        gauges=Gauges(
            outstanding_steps=int(outstanding),
            settled_steps=number("settled_steps"),
            log_entries=int(entries),
            log_bytes=number("log_bytes"),
        ),
        sessions=tuple(_session(row) for row in rows),
        learner_json=_text(learner),
        closed=bool(closed),
        max_log_bytes=number("max_log_bytes"),
        max_log_entries=number("max_log_entries"),
    )


def _session(row: Sequence[Any]) -> SessionRow:
    return SessionRow(
        session=int(row[0]),
        actor_id=_text(row[1]),
        role=Role(int(row[2])),
        sequence=int(row[3]),
        begin_through=int(row[4]),
        applied_version=int(row[5]),
        idle_ms=int(row[6]),
    )


def lease(reply: Sequence[Any]) -> Lease:
    """Convert the reply of `acquire.lua` with status OK."""
    epoch, fresh, closed, floor, version, head = map(int, reply[1:7])
    return Lease(
        epoch=epoch,
        fresh=bool(fresh),
        closed=bool(closed),
        committed=tuple(Commit.decode(text) for text in reply[7]),
        trim_floor=floor,
        version=version,
        head=head,
    )


def renewal(reply: Sequence[Any]) -> Renewal:
    """Convert the reply of `renew.lua` with status OK."""
    values = [int(value) for value in reply[1:16]]
    closed, desired, revision, checkpoint, size, entries, head, outstanding = values[:8]
    settled, settled_steps, acked, lost, evaluate, rollouts, expired = values[8:]
    flat = reply[16]
    return Renewal(
        desired=_desired(desired),
        revision=revision,
        checkpoint_revision=checkpoint,
        closed=bool(closed),
        log_bytes=size,
        log_entries=entries,
        head=head,
        outstanding=outstanding,
        settled=settled,
        settled_steps=settled_steps,
        acked=acked,
        log_lost=lost,
        evaluate_version=evaluate,
        rollout_sessions=rollouts,
        expired_sessions=expired,
        probes=tuple(_probe(*flat[i : i + 3]) for i in range(0, len(flat), 3)),
    )


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
    """Convert one entry of the stream REPORTS."""
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


def _desired(number: int) -> RunState:
    return RunState(number or 1)


def _text(value: bytes) -> str:
    return value.decode()
