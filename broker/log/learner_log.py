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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

from broker.log import keys, replies
from broker.log.connection import REPLY_TIMEOUT_S, connect
from broker.log.kept_weights import KeptWeights, chunks
from broker.log.learner_calls import LearnerCalls, fenced_off
from broker.log.log_memory import LogMemory, to_lua
from broker.log.records import (
    Commit,
    Lease,
    LogEntry,
    LogState,
    Pacing,
    Renewal,
    ReportEntry,
    Residue,
    Status,
    Verdict,
)
from penstock.config.settings import ConfigurationError
from penstock.rpc.tls_files import TlsFiles
from penstock.runtime.failpoint import failpoint
from penstock.wire.messages import Publication
from penstock.wire.refusal import Reason, Refusal, Refused

logger = logging.getLogger(__name__)

_MAX_BLOCK_MS: Final = int(REPLY_TIMEOUT_S * 1000 / 2)
_TRIM_SLICE: Final = 512
_FETCH_SLICE: Final = 64
_WALK_SLICE: Final = 1000


class LearnerLog:
    """See the module. Build with `connect`, then `acquire`, `start`; `release` and `close` at the end."""

    def __init__(self, client: Any, url: str, wait_s: float, stop: threading.Event) -> None:
        self._redis = client
        self._memory = LogMemory()
        self._calls = LearnerCalls(client, url, self._memory, wait_s=wait_s, stop=stop)
        self.kept = KeptWeights(self._calls, self._memory)

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
        """Wait for Redis to answer, up to `wait_s`; raises Fatal, or Interrupted when `stop` is set."""
        log = cls(connect(url, password, tls), url, wait_s, stop or threading.Event())
        log._calls.wait_until_up()
        return log

    def close(self) -> None:
        """Close every connection; keeps the lease."""
        self._redis.close()

    @property
    def epoch(self) -> int:
        """Epoch of the lease held; 0 before `acquire`."""
        return self._memory.state.epoch

    def max_memory_bytes(self) -> int:
        """Redis's `maxmemory`; 0 without a limit."""
        return int(self._calls.patient(lambda: self._redis.info("memory")).get("maxmemory", 0))

    # ---- lease

    def acquire(self, run: str, holder: str, ttl_ms: int) -> Lease:
        """Take the lease: at once when free, expired or held by the same holder.

        Raises Refused(FENCED, retry_after_ms) while another holds it, ConfigurationError when Redis holds
        another run.
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
        self._memory.holder = replace(self._memory.holder, run=run, name=holder, ttl_ms=ttl_ms)
        self._memory.replace(run=run, epoch=lease.epoch)
        return lease

    def renew(self) -> Renewal:
        """Keep the lease (every ttl/3), close expired sessions, learn the state; raises Refused(FENCED)."""
        renewal = replies.renewal(self._calls.fenced("renew", self._memory.holder.ttl_ms))
        if not renewal.closed:
            self._memory.raise_to(log_lost=renewal.log_lost, revision=renewal.revision)
        return renewal

    def release(self) -> None:
        """Let the next learner in at once; a stop that was asked for is done with it."""
        self._calls.run("release", self.epoch)

    # ---- opening

    def start(
        self,
        specification: bytes,
        pacing: Pacing,
        resume: LogState | None = None,
        position: int | None = None,
    ) -> None:
        """Write specification and pacing and open the log; sets settled *back* to `position`.

        specification: encoded RunSpecification. resume: from the checkpoint, None without one.
        position: of the checkpoint; default `resume.settled`, or 0. Also re-opens a closed or empty
        Redis from `resume`. Raises Refused(INVALID) when `position` lies behind the trim floor.
        """
        if position is None:
            position = resume.settled if resume is not None else 0
        holder = self._memory.holder
        self._memory.holder = replace(holder, specification=specification, pacing=pacing)
        if resume is not None:
            self._memory.resume(resume)
        self._memory.replace(specification=specification)
        self._open(resume, position)
        self._memory.replace(settled=position)

    def reopen(self, state: LogState) -> None:
        """Open the log of a restarted Redis: the maximum of both sides. Publish the weights next."""
        self._open(state, None)

    def snapshot(self) -> LogState:
        """What this process knows of the log; goes into every checkpoint and into `reopen`."""
        return self._memory.state

    def _open(self, state: LogState | None, position: int | None) -> None:
        """Open and trim; once more when Redis is restarted again in between."""
        while True:
            self._open_once(state, position)
            try:
                self._trim()
            except Refused as refused:
                if refused.refusal.reason is not Reason.NOT_READY:
                    raise
                logger.warning("Redis was restarted once more: opening the log again")
            else:
                return

    def _open_once(self, state: LogState | None, position: int | None) -> None:
        holder = self._memory.holder
        if holder.pacing is None:
            raise RuntimeError("LearnerLog.reopen before start: nothing says how the log is paced")
        arguments = (
            secrets.token_hex(8),
            holder.run,
            holder.name,
            holder.ttl_ms,
            holder.specification,
            json.dumps({name: int(value) for name, value in asdict(holder.pacing).items()}),
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

    # ---- reading

    def read(self, after: int, count: int, block_ms: int) -> list[LogEntry]:
        """Entries with number > `after` in order, at most `count`; waits up to `block_ms` (0: not)."""
        wait = min(block_ms, _MAX_BLOCK_MS) or None
        found: Any = self._calls.patient(
            lambda: self._redis.xread({keys.LOG: keys.entry_id(after)}, count=count, block=wait)
        )
        entries = [replies.log_entry(*entry) for entry in found[0][1]] if found else []
        self._memory.saw(entries)
        return entries

    def entries(self, numbers: Sequence[int]) -> list[LogEntry]:
        """Those of these numbers that are there, in order of number.

        For a reader that is told what to read.
        """
        if not numbers:
            return []
        first, last = keys.entry_id(min(numbers)), keys.entry_id(max(numbers))
        found: Any = self._calls.patient(lambda: self._redis.xrange(keys.LOG, min=first, max=last))
        wanted = set(numbers)
        entries = (replies.log_entry(*entry) for entry in found)
        return [entry for entry in entries if entry.number in wanted]

    def fetch(self, numbers: Sequence[int]) -> list[bytes | None]:
        """The payloads of entries; None where there is none (ask `missing`)."""
        payloads: list[bytes | None] = []
        for first in range(0, len(numbers), _FETCH_SLICE):
            names = [keys.payload(number) for number in numbers[first : first + _FETCH_SLICE]]
            payloads += self._calls.patient(partial(self._redis.execute_command, "MGET", *names))
        return payloads

    def missing(self, number: int) -> Verdict:
        """Why entry `number` or its payload is not there; raises Refused(NOT_READY) while closed."""
        try:
            reply = self._calls.fenced("missing", number)
        except Refused as refused:
            if refused.refusal.reason is Reason.FENCED:
                return Verdict.EPOCH_LOST
            raise
        return Verdict.TRIMMED if reply[0] == b"TRIMMED" else Verdict.LOG_LOST

    def read_reports(self, after: int, count: int) -> list[ReportEntry]:
        """Reports with number > `after` in order; the oldest may be gone when nobody read for long."""
        found: Any = self._calls.patient(
            lambda: self._redis.xrange(keys.REPORTS, min=f"({keys.entry_id(after)}", count=count)
        )
        reports = [replies.report_entry(*entry) for entry in found]
        if reports:
            self._memory.raise_to(reports=reports[-1].number)
        return reports

    def resident(self, after: int) -> int:
        """Number of entries behind `after`, by walking the log."""
        return self.residue(after).entries

    def residue(self, after: int) -> Residue:
        """What lies behind `after`, by walking the log; a number that is missing in it was lost."""
        total, last = 0, after
        while True:
            start = f"({keys.entry_id(last)}"
            found: Any = self._calls.patient(
                partial(self._redis.xrange, keys.LOG, min=start, count=_WALK_SLICE)
            )
            if not found:
                return Residue(entries=total, lost=last - after - total)
            total += sum(values[b"h"] != b"" for _, values in found)
            last = int(found[-1][0].partition(b"-")[0])

    def acked(self) -> int:
        """Fragments acknowledged over the run, counted by the append script."""
        return self._counter("acked")

    def log_lost(self) -> int:
        """Acknowledged fragments that actors knew and Redis lost, counted by the append script."""
        return self._counter("log_lost")

    def _counter(self, name: str) -> int:
        value = self._calls.patient(lambda: self._redis.execute_command("HGET", keys.STATE, name))
        return int(value or 0)

    def status(self) -> Status:
        """The run at one moment, its sessions included."""
        return replies.status(self._calls.run("status"))

    # ---- writing

    def settle(self, position: int) -> None:
        """Give the budget back up to `position` (entries dropped or skipped); never goes back."""
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

        round: the round that this publication opens; None, or one that is open or past, opens none.
        pin: keep the bytes until `end_evaluation`.
        """
        pieces = chunks(blob)
        version = self.kept.draw(blob)
        failpoint("publish.allocated", version)
        for index, chunk in enumerate(pieces):
            self._calls.fenced("store_chunk", version, index, chunk)
        failpoint("publish.stored", version)
        digest = hashlib.sha256(blob).hexdigest()
        text = json.dumps(dict(scalars))
        opens = "" if round is None else round
        self._calls.fenced(
            "publish", version, update, digest, len(blob), len(pieces), settled, text, opens, int(pin)
        )
        self._memory.raise_to(settled=settled, round=0 if round is None else round)
        return Publication(version, update, digest, len(blob))

    def request_evaluation(self, version: int) -> None:
        """Ask evaluation sessions to play a pinned version, instead of the one before."""
        self._calls.fenced("request_evaluation", version)

    def end_evaluation(self, version: int) -> None:
        """Ask for this version no more and let its bytes go; a newer one stays asked for."""
        self._calls.fenced("end_evaluation", version)

    def round_complete(self, round: int) -> bool:  # noqa: A002
        """True when every session of the round's roster has appended its fragment or is closed."""
        return bool(self._calls.fenced("round_complete", round)[1])

    def commit(self, commit: Commit) -> None:
        """Make a checkpoint count, then forget entries up to `commit.trim`; repeating changes nothing."""
        reply = self._calls.fenced("commit", commit.encode(), commit.position, commit.trim)
        self._memory.committed(commit, int(reply[1]))
        failpoint("commit.trimming", commit.trim)
        self._trim()

    def observe(self, json_text: str) -> None:
        """What the learner says of itself in Status."""
        self._calls.fenced("observe", json_text)

    def _trim(self) -> None:
        while int(self._calls.fenced("trim", _TRIM_SLICE)[1]) > 0:
            pass
