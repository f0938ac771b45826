"""The run in Redis as the learner uses it: lease, log, weights, commits (synchronous, thread-safe).

Every write carries the lease's epoch and is refused inside its script when another learner has a
newer one: `Refused(FENCED)`. While the log is closed (Redis was restarted) every write raises
`Refused(NOT_READY)` until `reopen`. A Redis that does not answer is waited for up to `wait_s`
(every call is safe to repeat), then `Fatal`.
"""

import threading
from collections.abc import Mapping, Sequence

from broker.state import (
    Commit,
    Lease,
    LogEntry,
    LogState,
    Pacing,
    Renewal,
    ReportEntry,
    Verdict,
)
from penstock.wire.messages import Publication


class LearnerLog:
    """See the module. Build with `connect`, then `acquire`, `start`; `release` and `close` at the end."""

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        wait_s: float,
        stop: threading.Event | None = None,
        password: str | None = None,
    ) -> "LearnerLog":
        """Wait for Redis to answer, up to `wait_s`; raises Fatal, or Interrupted when `stop` is set."""
        raise NotImplementedError

    def close(self) -> None:
        """Close every connection; keeps the lease."""

    @property
    def epoch(self) -> int:
        """Epoch of the lease held; 0 before `acquire`."""
        raise NotImplementedError

    # ---- lease

    def acquire(self, run: str, holder: str, ttl_ms: int) -> Lease:
        """Take the lease: at once when free, expired or held by the same holder.

        Raises Refused(FENCED, retry_after_ms) while another holds it, Fatal when Redis holds another run.
        """
        raise NotImplementedError

    def renew(self) -> Renewal:
        """Keep the lease (every ttl/3), close expired sessions, learn the state; raises Refused(FENCED)."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the next learner in at once."""

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
        position: of the checkpoint; default `resume.settled`, or 0. Also re-opens a closed or empty Redis
        from `resume`. Raises Refused(INVALID) when `position` lies behind the trim floor.
        """

    def reopen(self, state: LogState) -> None:
        """Open the log of a restarted Redis: the maximum of both sides. Publish the weights next."""

    def snapshot(self) -> LogState:
        """What this process knows of the log; goes into every checkpoint and into `reopen`."""
        raise NotImplementedError

    # ---- reading

    def read(self, after: int, count: int, block_ms: int) -> list[LogEntry]:
        """Entries with number > `after` in order, at most `count`; waits up to `block_ms` (0: not)."""
        raise NotImplementedError

    def fetch(self, numbers: Sequence[int]) -> list[bytes | None]:
        """The payloads of entries; None where there is none (ask `missing`)."""
        raise NotImplementedError

    def missing(self, number: int) -> Verdict:
        """Why entry `number` or its payload is not there."""
        raise NotImplementedError

    def read_reports(self, after: int, count: int) -> list[ReportEntry]:
        """Reports with number > `after` in order; the oldest may be gone when nobody read for long."""
        raise NotImplementedError

    def resident(self, after: int) -> int:
        """Number of entries behind `after`, by walking the log."""
        raise NotImplementedError

    def acked(self) -> int:
        """Fragments acknowledged over the run, counted by the append script."""
        raise NotImplementedError

    def log_lost(self) -> int:
        """Acknowledged fragments that actors knew and Redis lost, counted by the append script."""
        raise NotImplementedError

    # ---- writing

    def settle(self, position: int) -> None:
        """Give the budget back up to `position` (entries dropped or skipped); never goes back."""

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
        pin: keep the bytes until `unpin`.
        """
        raise NotImplementedError

    def unpin(self, version: int) -> None:
        """Let the bytes of a pinned version go with the others."""

    def request_evaluation(self, version: int) -> None:
        """Ask evaluation sessions to play a version whose bytes are kept; 0 asks for nothing."""

    def round_complete(self, round: int) -> bool:  # noqa: A002
        """True when every session of the round's roster has appended its fragment or is closed."""
        raise NotImplementedError

    def commit(self, commit: Commit) -> None:
        """Make a checkpoint count, then forget entries up to `commit.trim`; the second call changes nothing."""

    def observe(self, json_text: str) -> None:
        """What the learner says of itself in Status."""
