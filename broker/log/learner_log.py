"""The run in Redis as the learner uses it: lease, log, weights, commits (synchronous, thread-safe).

Every write carries the lease's epoch and is refused inside its script when another learner has a
newer one: `Refused(FENCED)`. While the log is closed (Redis was restarted) every fenced call but
`renew` raises `Refused(NOT_READY)` until `reopen`. A Redis that does not answer is waited for up to
`wait_s` (every call is safe to repeat), then `Fatal`.
"""

import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Final, TypeVar

from redis.exceptions import NoScriptError, RedisError, ResponseError

from penstock.broker.log import keys, replies
from penstock.broker.log.connection import (
    READ_BYTES,
    REPLY_TIMEOUT_S,
    connect,
    grouped,
    is_unavailable,
    without_password,
)
from penstock.broker.log.script import load
from penstock.config.settings import ConfigurationError
from penstock.protocol.limits import MAX_MESSAGE_BYTES, WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Publication
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.rpc.identity import TlsFiles
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.retry import retry

_KEPT_SEQUENCES: Final = 4096
_KEPT_COMMITS: Final = 8


class LogMemory:
    """The state of the log that one learner knows, for a restart of Redis. Only `replace` lowers a number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = replies.LogState(run="")

    @property
    def state(self) -> replies.LogState:
        """Return a consistent copy."""
        with self._lock:
            return self._state

    def replace(self, **values: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **values)

    def resume(self, state: replies.LogState) -> None:
        """Take over the state of a checkpoint, except for run and epoch."""
        with self._lock:
            self._state = replace(state, run=self._state.run, epoch=self._state.epoch)

    def raise_to(self, **values: int) -> None:
        """Set number fields to the maximum of what is known and what is given."""
        with self._lock:
            higher = {name: max(value, getattr(self._state, name)) for name, value in values.items()}
            self._state = replace(self._state, **higher)

    def saw(self, entries: Sequence[replies.LogEntry]) -> None:
        if not entries:
            return
        with self._lock:
            sequences = dict(self._state.sequences)
            for entry in entries:
                if entry.header is not None:
                    session = entry.header.session
                    sequences[session] = max(sequences.pop(session, 0), entry.header.sequence)
            while len(sequences) > _KEPT_SEQUENCES:
                del sequences[next(iter(sequences))]
            newest = max(entries, key=lambda entry: entry.number)
            self._state = replace(
                self._state,
                sequences=sequences,
                session=max(self._state.session, max(sequences, default=0)),
                number=max(self._state.number, newest.number),
                steps_total=max(self._state.steps_total, newest.steps_total),
            )

    def committed(self, commit: replies.Commit, trim_floor: int) -> None:
        with self._lock:
            commits = tuple(known for known in self._state.commits if known != commit)
            self._state = replace(
                self._state,
                commits=(*commits, commit)[-_KEPT_COMMITS:],
                trim_floor=max(trim_floor, self._state.trim_floor),
            )


def to_lua(state: replies.LogState) -> dict[str, Any]:
    """Return the state as `open_log.lua` reads it: commits as the texts that Redis keeps."""
    plain = {item.name: getattr(state, item.name) for item in fields(state) if item.type in (int, "int")}
    plain.pop("epoch")
    return {
        **plain,
        "sequences": {str(session): last for session, last in state.sequences.items()},
        "commits": [commit.encode() for commit in state.commits],
    }


log = logging.getLogger(__name__)

T = TypeVar("T")

_ANY_INCARNATION: Final = ""
"""A learner's writes are fenced by its epoch, which rises with every incarnation."""
DRAIN_WAIT_S: Final = 5.0
"""Seconds that a call waits for Redis once the process drains."""


class LearnerCalls:
    """Runs scripts with retries, fenced by the epoch, which changes only while `opening` is held."""

    def __init__(
        self, client: Any, url: str, memory: LogMemory, *, wait_s: float, stop: threading.Event
    ) -> None:
        self.client = client
        self.url = without_password(url)
        """As messages may show it."""
        self.opening = threading.Lock()
        self._memory = memory
        self._wait_s = wait_s
        self._stop = stop

    def wait_until_up(self) -> None:
        """Raise Fatal after `wait_s`, Interrupted at a drain, ConfigurationError where Redis refuses."""
        self._waited(lambda: self.client.execute_command("PING"), self._stop, self._wait_s)

    def patient(self, call: Callable[[], T]) -> T:
        """Repeat `call` while Redis does not answer; raises Fatal after `wait_s`."""
        try:
            return call()
        except RedisError as error:
            if not is_unavailable(error):
                raise
        # Not the process's own stop event: a draining learner still has to commit.
        wait_s = min(DRAIN_WAIT_S, self._wait_s) if self._stop.is_set() else self._wait_s
        return self._waited(call, threading.Event(), wait_s)

    def run(self, name: str, *arguments: Any) -> Any:
        """Return the reply of the script `name`; raises Fatal where the run has another layout."""
        script = load(name)

        def evaluate() -> Any:
            try:
                return self.client.execute_command("EVALSHA", script.sha1, 0, *arguments, _ANY_INCARNATION)
            except NoScriptError:
                return self.client.execute_command("EVAL", script.source, 0, *arguments, _ANY_INCARNATION)

        try:
            return replies.unpack(self.patient(evaluate))[1]
        except replies.OtherLayout as error:
            raise Fatal(str(error)) from error

    def fenced(self, name: str, *arguments: Any) -> Any:
        """Run a script whose first argument is the epoch; raises Refused(FENCED or NOT_READY)."""
        while True:
            epoch = self._memory.state.epoch
            reply = self.run(name, epoch, *arguments)
            if reply[0] == b"CLOSED":
                detail = "Redis was restarted: the log waits to be re-opened"
                raise Refused(Refusal(reason=Reason.NOT_READY, detail=detail))
            if reply[0] != b"FENCED":
                return reply
            with self.opening:  # our own re-opening, in another thread, raises the epoch too
                if self._memory.state.epoch == epoch:
                    raise fenced_off()

    def _waited(self, call: Callable[[], T], stop: threading.Event, wait_s: float) -> T:
        def tell(error: Exception, delay_s: float) -> None:
            log.warning("waiting for Redis", extra={"error": str(error), "delay_s": round(delay_s, 2)})

        try:
            return retry(call, retryable=is_unavailable, stop=stop, on_wait=tell, give_up_s=wait_s)
        except RedisError as error:
            if not is_unavailable(error):
                raise ConfigurationError(
                    f"Redis at {self.url}: {error}; check the URL's user and security.redis_password"
                ) from error
            how = "refused writes" if isinstance(error, ResponseError) else "did not answer"
            raise Fatal(f"Redis at {self.url} {how} for {wait_s:g} s: {error}") from error


def fenced_off() -> Refused:
    """Return the refusal for a learner whose lease another learner has taken."""
    return Refused(Refusal(reason=Reason.FENCED, detail="another learner has taken the lease over"))


class KeptWeights:
    """Bytes of kept versions in Redis; its methods raise as those of `LearnerLog` do."""

    def __init__(self, calls: LearnerCalls, memory: LogMemory) -> None:
        self._calls = calls
        self._memory = memory

    def keep(self, versions: Collection[int], *, highest: int, traffic_revision: int) -> tuple[int, ...]:
        """Hold the bytes of exactly these; returns those missing. highest: no number up to it is drawn."""
        reply = self._calls.fenced("keep_versions", traffic_revision, highest, *sorted(versions))
        self._memory.raise_to(version=highest)
        return tuple(int(version) for version in reply[1:])

    def restore(self, publication: Publication, blob: bytes) -> None:
        """Put the bytes (safetensors) of a kept version back, unless it is not kept or they are there."""
        version, pieces = publication.version, chunks(blob)
        self._calls.fenced("stage_version", version, len(pieces))
        for index, chunk in enumerate(pieces):
            self._calls.fenced("store_chunk", version, index, chunk)
        self._calls.fenced(
            "restore_version", version, publication.update, publication.sha256, len(blob), len(pieces)
        )

    def draw(self, blob: bytes) -> int:
        """Allocate a version number that was never used before; `keep` it before it is restored."""
        version = int(self._calls.fenced("allocate_version", len(chunks(blob)))[1])
        self._memory.raise_to(version=version)
        return version


def chunks(blob: bytes) -> list[bytes]:
    return [blob[at : at + WEIGHT_CHUNK_BYTES] for at in range(0, len(blob), WEIGHT_CHUNK_BYTES)]


_MAX_BLOCK_MS: Final = int(REPLY_TIMEOUT_S * 1000 / 2)
_FETCH_SLICE: Final = 64
_WALK_SLICE: Final = 1000
_TRIM_SLICE: Final = 512


class LearnerLog:
    """Gives the learner its lease, log, weights and commits in Redis; thread-safe.

    Build it with `connect`, then call `acquire` and `start`; call `release` and `close` at the end. Methods
    that write raise Refused(FENCED) when another learner has a newer lease and, but for `renew`,
    Refused(NOT_READY) while the log is closed; every method raises Fatal when Redis does not answer for
    `wait_s`.
    """

    def __init__(self, client: Any, url: str, wait_s: float, stop: threading.Event) -> None:
        self._memory = LogMemory()
        self._calls = LearnerCalls(client, url, self._memory, wait_s=wait_s, stop=stop)
        self.kept = KeptWeights(self._calls, self._memory)
        self._holder, self._ttl_ms = "", 0
        self._pacing: replies.Pacing | None = None

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        wait_s: float,
        stop: threading.Event | None = None,
        password: str | None = None,
        tls: TlsFiles | None = None,
    ) -> "LearnerLog":
        """Return a log whose Redis answers; raises Fatal when it does not within `wait_s`, Interrupted."""
        log = cls(connect(url, password, tls), url, wait_s, stop or threading.Event())
        log._calls.wait_until_up()
        return log

    def close(self) -> None:
        """Close every connection; the lease stays held until it expires or is released."""
        self._calls.client.close()

    @property
    def epoch(self) -> int:
        return self._memory.state.epoch

    def max_memory_bytes(self) -> int:
        return int(self._calls.patient(lambda: self._calls.client.info("memory")).get("maxmemory", 0))

    # ---- lease

    def acquire(self, run: str, holder: str, ttl_ms: int) -> replies.Lease:
        """Take the lease; succeeds at once when it is free, expired or held by the same holder.

        holder: name of this learner, the same after a restart. Raises Refused (FENCED, with `retry_after_ms`)
        while another learner holds it, ConfigurationError where Redis holds another run.
        """
        reply = self._calls.run("acquire", run, holder, ttl_ms)
        if reply[0] == b"OTHER_RUN":
            raise ConfigurationError(
                f"Redis at {self._calls.url} holds run {reply[1].decode()!r}, not {run!r}: "
                "give each run a Redis of its own, or resume that run"
            )
        if reply[0] == b"HELD":
            detail = f"the lease is held by {reply[1].decode()!r} for another {int(reply[2])} ms"
            raise Refused(Refusal(reason=Reason.FENCED, detail=detail, retry_after_ms=int(reply[2]) + 1))
        lease = replies.lease(reply)
        self._holder, self._ttl_ms = holder, ttl_ms
        self._memory.replace(run=run, epoch=lease.epoch)
        return lease

    def renew(self) -> replies.Renewal:
        """Keep the lease (every ttl/3), close expired sessions, return the state. Raises Refused(FENCED)."""
        newest = self._memory.state.number
        renewal = replies.renewal(self._calls.fenced("renew", self._ttl_ms, newest))
        if not renewal.closed:
            self._memory.raise_to(log_lost=renewal.log_lost, revision=renewal.revision)
        return renewal

    def convict(self, session: int, actor_id: str, why: str) -> None:
        """Close a session because of its experience; safe to repeat. actor_id: "" is not counted."""
        self._calls.fenced("convict", session, actor_id, why)

    def release(self) -> None:
        """Give the lease back, which completes a requested stop."""
        self._calls.run("release", self.epoch)

    # ---- opening

    def start(
        self,
        specification: bytes,
        pacing: replies.Pacing,
        resume: replies.LogState | None = None,
        position: int | None = None,
    ) -> None:
        """Write specification and pacing and open the log; sets settled *back* to `position`.

        A closed or empty Redis is opened again from `resume`, the state in the checkpoint. position: of the
        checkpoint, default `resume.settled`, or 0. Raises Refused (INVALID) for one behind the trim floor.
        """
        if position is None:
            position = resume.settled if resume is not None else 0
        self._pacing = pacing
        if resume is not None:
            self._memory.resume(resume)
        self._memory.replace(specification=specification)
        self._open(resume, position)
        self._memory.replace(settled=position)

    def reopen(self, state: replies.LogState) -> None:
        """Open the log of a restarted Redis with the maximum of both sides' counters. Publish next."""
        self._open(state, None)

    def snapshot(self) -> replies.LogState:
        """Return what this process knows of the log, for checkpoints and for `reopen`."""
        return self._memory.state

    def _open(self, state: replies.LogState | None, position: int | None) -> None:
        """Open and trim the log; once more when Redis is restarted in between."""
        while True:
            self._open_once(state, position)
            try:
                self._trim()
            except Refused as refused:
                if refused.refusal.reason is not Reason.NOT_READY:
                    raise
                log.warning("Redis was restarted once more: opening the log again")
            else:
                return

    def _open_once(self, state: replies.LogState | None, position: int | None) -> None:
        if self._pacing is None:
            raise RuntimeError("LearnerLog.reopen before start: the pacing of the log is not known")
        arguments = (
            secrets.token_hex(8),
            self._memory.state.run,
            self._holder,
            self._ttl_ms,
            self._memory.state.specification,
            json.dumps({name: int(value) for name, value in asdict(self._pacing).items()}),
            json.dumps(to_lua(state)) if state is not None else "",
            "" if position is None else position,
        )
        with self._calls.opening:
            reply = self._calls.run("open_log", self.epoch, *arguments)
            if reply[0] == b"OK":
                self._memory.replace(epoch=int(reply[1]))
        if reply[0] == b"TRIMMED":
            detail = f"position {position} lies behind the trim floor {int(reply[1])}: use --allow-loss"
            raise Refused(Refusal(reason=Reason.INVALID, detail=detail))
        if reply[0] == b"FENCED":
            raise fenced_off()

    # ---- writing

    def settle(self, position: int) -> None:
        """Return budget up to `position` (entries dropped or skipped), unless it was returned already."""
        self._calls.fenced("settle", position)
        self._memory.raise_to(settled=position)

    def publish(
        self,
        blob: bytes,
        *,
        update: int,
        settled: int,
        scalars: Mapping[str, float],
        round: int | None = None,  # noqa: A002 - the word of the contract
        pin: bool = False,
    ) -> Publication:
        """Store the bytes under a new version, move the pointer, settle, and in lock-step open `round`.

        Args:
            blob: weights as safetensors.
            update: number of the learner's update.
            settled: last entry that this version has been trained on, or that was dropped.
            scalars: figures of the update by name, which travel with the version.
            round: lock-step round that this publication opens; None, or one that is open or past, opens none.
            pin: keep the bytes until `end_evaluation`.
        """
        pieces = chunks(blob)
        version = self.kept.draw(blob)
        failpoint("publish.allocated", version)
        for index, chunk in enumerate(pieces[:-1]):
            self._calls.fenced("store_chunk", version, index, chunk)
        failpoint("publish.stored", version)
        digest = hashlib.sha256(blob).hexdigest()
        text = json.dumps(dict(scalars))
        opens = "" if round is None else round
        counts = len(blob), len(pieces)
        self._calls.fenced(
            "publish", version, update, digest, *counts, settled, text, opens, int(pin), pieces[-1]
        )
        self._memory.raise_to(settled=settled, round=0 if round is None else round)
        return Publication(version, update, digest, len(blob))

    def request_evaluation(self, version: int) -> None:
        """Request the evaluation of a pinned version, in place of the one requested before."""
        self._calls.fenced("request_evaluation", version)

    def end_evaluation(self, version: int) -> None:
        """Withdraw the request for this version and release its bytes; a newer request stays."""
        self._calls.fenced("end_evaluation", version)

    def round_complete(self, round: int) -> bool:  # noqa: A002
        """Return True when every session of the round's roster has appended its fragment or is closed."""
        return bool(self._calls.fenced("round_complete", round)[1])

    def commit(self, commit: replies.Commit) -> None:
        """Make a checkpoint count, then remove entries up to `commit.trim`; may be repeated."""
        answers = [part for one in commit.answers for part in (one.number, one.encode())]
        reply = self._calls.fenced("commit", commit.encode(), commit.position, commit.trim, *answers)
        self._memory.committed(commit, int(reply[1]))
        failpoint("commit.trimming", commit.trim)
        self._trim()

    def commands(self) -> list[replies.Command]:
        """Return the newest commands of operators, oldest first, answered or not."""
        found = [replies.Command.from_reply(reply) for reply in self._calls.run("commands")]
        if found:
            self._memory.raise_to(command=found[-1].number)
        return found

    def flush(self, number: int, *, force: bool) -> tuple[int, int | None]:
        """Request a flush of policy servers; returns how many have not answered, and what is taken.

        The second is the newest log entry of the flush; None while it is not decided. It is decided once,
        when all have answered or where `force` says so. number: of the command.
        """
        reply = self._calls.fenced("flush", number, int(force))
        return int(reply[1]), int(reply[2]) if reply[2] else None

    def answer(self, answer: replies.Answer) -> None:
        """Answer that a command was not done; the answer to one that was done travels with its commit."""
        self._calls.fenced("answer", answer.number, answer.encode())

    def observe(self, json_text: str) -> None:
        """Store the learner's report of itself (JSON), which `status` shows."""
        self._calls.fenced("observe", json_text)

    def _trim(self) -> None:
        while int(self._calls.fenced("trim", _TRIM_SLICE)[1]) > 0:
            pass

    # ---- reading

    def read(self, after: int, count: int, block_ms: int) -> list[replies.LogEntry]:
        """Return entries with number > `after`, at most `count`; waits up to `block_ms` (0: not at all)."""
        wait = min(block_ms, _MAX_BLOCK_MS) or None
        found: Any = self._calls.patient(
            lambda: self._calls.client.xread({keys.LOG: keys.entry_id(after)}, count=count, block=wait)
        )
        entries = [replies.log_entry(*entry) for entry in found[0][1]] if found else []
        self._memory.saw(entries)
        return entries

    def entries(self, numbers: Sequence[int]) -> list[replies.LogEntry]:
        """Return those of the named entries that are in the log, in order of number."""
        if not numbers:
            return []
        first, last = keys.entry_id(min(numbers)), keys.entry_id(max(numbers))
        found: Any = self._calls.patient(lambda: self._calls.client.xrange(keys.LOG, min=first, max=last))
        wanted = set(numbers)
        entries = (replies.log_entry(*entry) for entry in found)
        return [entry for entry in entries if entry.number in wanted]

    def fetch(self, numbers: Sequence[int], sizes: Sequence[int] = ()) -> list[bytes | None]:
        """Return the payloads of entries; None where there is none (`missing` says why).

        Redis holds a reply until it is read, so no reply has more than READ_BYTES, a single payload apart.
        sizes: bytes of the payloads; without them each may have as many as a message.
        """
        payloads: list[bytes | None] = []
        sizes = sizes or [MAX_MESSAGE_BYTES] * len(numbers)
        for some in grouped(numbers, sizes, READ_BYTES, _FETCH_SLICE):
            names = map(keys.payload, some)
            payloads += self._calls.patient(partial(self._calls.client.execute_command, "MGET", *names))
        return payloads

    def missing(self, number: int) -> replies.MissingReason:
        """Return why entry or payload is missing; raises Refused(NOT_READY) while the log is closed."""
        try:
            reply = self._calls.fenced("missing", number)
        except Refused as refused:
            if refused.refusal.reason is Reason.FENCED:
                return replies.MissingReason.EPOCH_LOST
            raise
        return replies.MissingReason.TRIMMED if reply[0] == b"TRIMMED" else replies.MissingReason.LOG_LOST

    def read_reports(self, after: int, count: int) -> list[replies.ReportEntry]:
        """Return reports with number > `after`; the oldest are dropped when they are not read for long."""
        found: Any = self._calls.patient(
            lambda: self._calls.client.xrange(keys.REPORTS, min=f"({keys.entry_id(after)}", count=count)
        )
        reports = [replies.report_entry(*entry) for entry in found]
        if reports:
            self._memory.raise_to(reports=reports[-1].number)
        return reports

    def residue(self, after: int) -> replies.Residue:
        """Return what lies behind `after`, by walking the log; a number that is missing there was lost."""
        total, last = 0, after
        while True:
            start = f"({keys.entry_id(last)}"
            found: Any = self._calls.patient(
                partial(self._calls.client.xrange, keys.LOG, min=start, count=_WALK_SLICE)
            )
            if not found:
                return replies.Residue(entries=total, lost=last - after - total)
            total += sum(values[b"h"] != b"" for _, values in found)
            last = int(found[-1][0].partition(b"-")[0])

    def fetched_versions(self) -> int:
        """Return the number of versions, of more than one chunk, that actors are fetching."""
        return int(self._calls.patient(lambda: self._calls.client.execute_command("HLEN", keys.FETCHES)))

    def acked(self) -> int:
        """Return the fragments acknowledged over the run, as the append script counts them."""
        return self._counter("acked")

    def log_lost(self) -> int:
        """Return how many acknowledged fragments Redis lost, as the append script counts them."""
        return self._counter("log_lost")

    def _counter(self, name: str) -> int:
        value = self._calls.patient(lambda: self._calls.client.execute_command("HGET", keys.STATE, name))
        return int(value or 0)

    def status(self) -> replies.Status:
        return replies.status(self._calls.run("status"))
