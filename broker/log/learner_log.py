"""The run in Redis as the learner uses it: lease, log, weights, commits (synchronous, thread-safe).

`penstock.broker.log.log_reader` reads, and this module adds what writes.

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
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from penstock.broker.log import replies
from penstock.broker.log.commands import Answer, Command
from penstock.broker.log.connection import connect
from penstock.broker.log.kept_weights import KeptWeights, chunks
from penstock.broker.log.learner_calls import LearnerCalls, fenced_off
from penstock.broker.log.learner_records import Commit, Lease, LogState, Pacing, Renewal
from penstock.broker.log.log_memory import LogMemory, to_lua
from penstock.broker.log.log_reader import LogReader
from penstock.config.settings import ConfigurationError
from penstock.protocol.messages import Publication
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.rpc.tls_files import TlsFiles
from penstock.runtime.failpoint import failpoint

log = logging.getLogger(__name__)

_TRIM_SLICE: Final = 512


class LearnerLog(LogReader):
    """Gives the learner its lease, log, weights and commits in Redis; thread-safe.

    Build it with `connect`, then call `acquire` and `start`; call `release` and `close` at the end. Methods
    that write raise Refused(FENCED) when another learner has a newer lease and, but for `renew`,
    Refused(NOT_READY) while the log is closed; every method raises Fatal when Redis does not answer for
    `wait_s`.
    """

    def __init__(self, client: Any, url: str, wait_s: float, stop: threading.Event) -> None:
        memory = LogMemory()
        super().__init__(LearnerCalls(client, url, memory, wait_s=wait_s, stop=stop), memory)
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
        """Return a log whose Redis answers.

        Args:
            url: `redis://`, `rediss://` or `unix:///path`.
            wait_s: longest wait for Redis, here and in every call, in seconds.
            stop: set when the process drains; it ends the wait.
            password: of the server, None where it asks for none.
            tls: certificates for `rediss://`.

        Raises:
            Fatal: Redis did not answer within `wait_s`.
            Interrupted: `stop` was set.
        """
        log = cls(connect(url, password, tls), url, wait_s, stop or threading.Event())
        log._calls.wait_until_up()
        return log

    def close(self) -> None:
        """Close every connection; the lease stays held until it expires or is released."""
        self._calls.client.close()

    @property
    def epoch(self) -> int:
        """Return the epoch of the lease that is held; 0 before `acquire`."""
        return self._memory.state.epoch

    def max_memory_bytes(self) -> int:
        """Return Redis's `maxmemory`; 0 without a limit."""
        return int(self._calls.patient(lambda: self._calls.client.info("memory")).get("maxmemory", 0))

    # ---- lease

    def acquire(self, run: str, holder: str, ttl_ms: int) -> Lease:
        """Take the lease; succeeds at once when it is free, expired or held by the same holder.

        Args:
            run: name of the run.
            holder: name of this learner, the same after a restart.
            ttl_ms: milliseconds for which the lease holds without a renewal.

        Raises:
            Refused: FENCED with `retry_after_ms`, while another learner holds it.
            ConfigurationError: Redis holds another run.
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
        """Keep the lease (every ttl/3), close expired sessions, return the state.

        Raises Refused(FENCED).
        """
        ttl_ms, newest = self._memory.holder.ttl_ms, self._memory.state.number
        renewal = replies.renewal(self._calls.fenced("renew", ttl_ms, newest))
        if not renewal.closed:
            self._memory.raise_to(log_lost=renewal.log_lost, revision=renewal.revision)
        return renewal

    def release(self) -> None:
        """Give the lease back, so that the next learner need not wait.

        Completes a stop that was asked for.
        """
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

        A closed or empty Redis is opened again from `resume`.

        Args:
            specification: encoded RunSpecification.
            pacing: budget and limits that admit fragments.
            resume: state of the log in the checkpoint, None without one.
            position: log position of the checkpoint; default `resume.settled`, or 0.

        Raises:
            Refused: INVALID when `position` lies behind the trim floor.
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
        """Open the log of a restarted Redis with the maximum of both sides' counters.

        Publish the weights next.
        """
        self._open(state, None)

    def snapshot(self) -> LogState:
        """Return what this process knows of the log, for checkpoints and for `reopen`."""
        return self._memory.state

    def _open(self, state: LogState | None, position: int | None) -> None:
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

    # ---- writing

    def settle(self, position: int) -> None:
        """Return budget up to `position` (entries dropped or skipped).

        A position behind the current one is ignored.
        """
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
        """Ask evaluation sessions to play a pinned version, which replaces the one asked for before."""
        self._calls.fenced("request_evaluation", version)

    def end_evaluation(self, version: int) -> None:
        """Stop asking for this version and release its bytes; a newer one stays asked for."""
        self._calls.fenced("end_evaluation", version)

    def round_complete(self, round: int) -> bool:  # noqa: A002
        """Return True when every session of the round's roster has appended its fragment or is closed."""
        return bool(self._calls.fenced("round_complete", round)[1])

    def commit(self, commit: Commit) -> None:
        """Make a checkpoint count, then remove entries up to `commit.trim`.

        Repeating the call changes nothing.
        """
        answers = [part for one in commit.answers for part in (one.number, one.encode())]
        reply = self._calls.fenced("commit", commit.encode(), commit.position, commit.trim, *answers)
        self._memory.committed(commit, int(reply[1]))
        failpoint("commit.trimming", commit.trim)
        self._trim()

    def commands(self) -> list[Command]:
        """Return the newest commands of operators, oldest first, answered or not."""
        found = [Command.from_reply(reply) for reply in self._calls.run("commands")]
        if found:
            self._memory.raise_to(command=found[-1].number)
        return found

    def flush(self, number: int, *, force: bool) -> tuple[int, int | None]:
        """Ask policy servers for what they have cut; returns how many have not answered, and what is taken.

        The second is the newest log entry of the flush; None while it is not decided. It is decided once,
        when all have answered or where `force` says so. number: of the command.
        """
        reply = self._calls.fenced("flush", number, int(force))
        return int(reply[1]), int(reply[2]) if reply[2] else None

    def answer(self, answer: Answer) -> None:
        """Say that a command was not done; what was done is said with its commit."""
        self._calls.fenced("answer", answer.number, answer.encode())

    def observe(self, json_text: str) -> None:
        """Store the learner's report of itself (JSON), which `status` shows."""
        self._calls.fenced("observe", json_text)

    def _trim(self) -> None:
        while int(self._calls.fenced("trim", _TRIM_SLICE)[1]) > 0:
            pass
