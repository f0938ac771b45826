"""Read what Redis holds of a run for `penstock audit`: entries, digests, counters, commits and known losses.

It only reads, with plain commands, so that a copy of a stopped server can be read as well as a live one. A
live run continues meanwhile: entries are walked first and the commits are read last, so an entry that is
trimmed in between is behind the newest commit.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import RedisError

from penstock.broker.log import keys, replies
from penstock.broker.log.connection import connect, grouped, without_password
from penstock.broker.log.replies import Commit, LogEntry
from penstock.broker.log.script import KEPT_LOST
from penstock.protocol.fragment import Beginning, Fragment, beginnings, parse_header
from penstock.rpc.identity import TlsFiles
from penstock.runtime.exit import Fatal

_SLICE: Final = 64
_REPLY_BYTES: Final = 4 * 2**20
"""Payloads in one reply, so few that the calls of a live run do not wait."""
_COUNTERS: Final = (
    "number",
    "acked",
    "log_lost",
    "trimmed",
    "trim_floor",
    "epoch",
    "version",
    "reopened",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldEntry:
    """An entry of the log as an audit reads it.

    session: 0 for a marker that ends a hole. sha256: "" without a payload.
    slots, weights: as `penstock.actor.link.ack_journal.Acknowledged` has them.
    """

    number: int
    session: int = 0
    sequence: int = 0
    actor: str = ""
    sha256: str = ""
    slots: tuple[Beginning, ...] = ()
    weights: tuple[tuple[int, int], ...] = ()
    created_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFragments:
    """Sequences that Redis lost, up to `last` (None: no bound), unless another record has them."""

    session: int
    first: int
    last: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSessions:
    """Session numbers drawn in the seconds that Redis lost, with what was sent in them unless recorded."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLog:
    """Everything that an audit reads from Redis.

    counters: fields of the hash STATE, at one moment. number_before: its `number` before the entries were
    walked. publications: version → update, of those whose bytes are kept. lost_is_whole: newer records of
    losses have pushed out none. closed: the run has not been opened again since this server started.
    """

    run: str
    number_before: int
    counters: Mapping[str, int]
    entries: tuple[HeldEntry, ...]
    shadow: tuple[tuple[int, int], ...]
    commits: tuple[Commit, ...]
    publications: Mapping[int, int]
    lost_fragments: tuple[LostFragments, ...]
    lost_sessions: tuple[LostSessions, ...]
    lost_is_whole: bool
    closed: bool


def read_log(url: str, password: str | None = None, tls: TlsFiles | None = None) -> HeldLog | None:
    """Return the run in a server, None when it holds none; raises Fatal when it does not answer."""
    client = connect(url, password, tls, greets=False)
    try:
        return _read(client)
    except RedisError as error:
        raise Fatal(f"audit: Redis at {without_password(url)}: {error}") from error
    finally:
        client.close()


def _read(client: Any) -> HeldLog | None:
    if client.execute_command("EXISTS", keys.STATE) == 0:
        return None
    number_before = int(client.execute_command("HGET", keys.STATE, "number") or 0)
    entries = tuple(_entries(client))
    shadow = [parse_header(values[b"h"]) for _, values in client.xrange(keys.SHADOW)]
    publications = client.execute_command("HGETALL", keys.PUBLICATIONS)
    lost = [text.decode().split(" ") for text in client.execute_command("LRANGE", keys.LOST, 0, -1)]
    commits = client.execute_command("LRANGE", keys.COMMITS, 0, -1)
    state = client.execute_command("HGETALL", keys.STATE)
    return HeldLog(
        run=state.get(b"run", b"").decode(),
        counters={name: int(state.get(name.encode(), 0)) for name in _COUNTERS},
        number_before=number_before,
        entries=entries,
        shadow=tuple((header.session, header.sequence) for header in shadow),
        commits=tuple(Commit.decode(text) for text in commits),
        publications={
            int(version): replies.publication(int(version), value).update
            for version, value in publications.items()
        },
        lost_fragments=(*(_fragments(words) for words in lost if words[0] == "fragments"), *_untold(client)),
        lost_sessions=tuple(
            LostSessions(first=int(words[1]), last=int(words[2])) for words in lost if words[0] == "sessions"
        ),
        lost_is_whole=len(lost) < KEPT_LOST,
        closed=state.get(b"closed") == b"1"
        or state.get(b"redis_run_id", b"").decode() != client.info("server")["run_id"],
    )


def _fragments(words: Sequence[str]) -> LostFragments:
    last = None if words[3] == "+" else int(words[3])
    return LostFragments(session=int(words[1]), first=int(words[2]), last=last)


def _untold(client: Any) -> Iterator[LostFragments]:
    """Yield the sessions that were open when Redis went back and have not reported since."""
    for session in client.execute_command("ZRANGE", keys.OPEN, 0, -1):
        row = f"{keys.SESSION}{int(session)}"
        returned, sequence = client.execute_command("HMGET", row, "returned", "sequence")
        if returned == b"1":
            yield LostFragments(session=int(session), first=int(sequence or 0) + 1, last=None)


def _entries(client: Any) -> Iterator[HeldEntry]:
    last = 0
    while True:
        found = client.xrange(keys.LOG, min=f"({keys.entry_id(last)}", count=_SLICE)
        if not found:
            return
        entries = [replies.log_entry(*entry) for entry in found]
        for group in grouped(entries, [entry.size for entry in entries], _REPLY_BYTES, _SLICE):
            payloads = client.execute_command("MGET", *(keys.payload(entry.number) for entry in group))
            for entry, payload in zip(group, payloads, strict=True):
                yield _held(entry, payload)
        last = entries[-1].number


def _held(entry: LogEntry, payload: bytes | None) -> HeldEntry:
    header = entry.header
    if header is None:
        return HeldEntry(number=entry.number)
    try:
        slots = beginnings(Fragment(header, payload or b""))
    except ValueError:  # gone or changed: its digest says so
        slots = ()
    return HeldEntry(
        number=entry.number,
        session=header.session,
        sequence=header.sequence,
        actor=entry.actor_id,
        sha256="" if payload is None else hashlib.sha256(payload).hexdigest(),
        slots=slots,
        weights=tuple((span.version, span.update) for span in header.weights),
        created_us=header.created_us,
    )
