"""When a checkpoint is due, its steps (write, lineage, commit, trim, prune), and which one is resumed.

After a crash in between a checkpoint either does not count or has all its bytes on disk. The log is trimmed
behind the second newest one of this lineage only, and behind what the algorithm retained when that was made,
so that one damaged checkpoint costs nothing.
"""

import bisect
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Answer, Commit, Lease, Renewal
from penstock.learner.algorithms.algorithm import Algorithm, LogShare
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore, Damaged
from penstock.learner.lease import LeaseKeeper
from penstock.learner.ledger import Ledger, Progress, append_lineage
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal, RunFailed
from penstock.runtime.failpoint import failpoint

PRESSURE: Final = 0.6
"""A checkpoint is due when it would release more than this share of the log's room."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Checkpointer:
    """Makes the checkpoints of this process, between two updates.

    lineage: commits before the start, oldest first. room: of the log, without the budget and the algorithm's
    share.
    """

    store: CheckpointStore
    learner_log: LearnerLog
    lease: LeaseKeeper
    ledger: Ledger
    algorithm: Algorithm
    _: KW_ONLY
    lineage: InitVar[Sequence[Commit]]
    lineage_path: Path
    interval_s: float
    room: LogShare

    def __post_init__(self, lineage: Sequence[Commit]) -> None:
        self._lineage = list(lineage)
        self._serial = 0
        self._spared: frozenset[str] = frozenset()
        self._at_s = time.monotonic()
        self.seconds = 0.0
        """Spent on checkpoints so far."""
        # Whether something was learned that no checkpoint holds.
        self._is_behind = not self._lineage
        self._revision = self.lease.renewal.checkpoint_revision
        self._trim = self._lineage[-1].trim if self._lineage else 0
        self._unneeded = self._needed_after(self._lineage[-1].position) if self._lineage else 0
        """Last entry that a resume from the newest checkpoint does not need."""
        # The bytes before the start are not known: all of the log is their upper bound.
        self._consumed = _Consumed(self._trim, self.ledger.position, self.lease.renewal.log_bytes)

    def consumed(self, size: int) -> None:
        """Note that the ledger moved over entries of `size` payload bytes; 0 for those of a recording."""
        self._consumed.add(self.ledger.position, size)
        self._is_behind = True

    def due(self, renewal: Renewal) -> bool:
        is_requested = renewal.checkpoint_revision != self._revision
        is_time = time.monotonic() - self._at_s >= self.interval_s and self._is_behind
        return is_requested or is_time or self._is_pressed()

    def spare(self, best: str, candidate: str) -> None:
        """Keep these checkpoints however old they are: of the best evaluation and of the pending one.

        "" for none. Without a new best one, the former one stays named and is kept.
        """
        if best:
            self.store.name_best(best)
        self._spared = frozenset({self.store.best(), candidate})

    def save(
        self,
        progress: Progress,
        more: Mapping[str, Tensor] | None = None,
        answers: Callable[[str], tuple[Answer, ...]] = lambda _checkpoint_id: (),
    ) -> None:
        """Make and commit a checkpoint; a second one where the first freed nothing and room is short.

        more: tensors that are not the algorithm's. answers: given the checkpoint's id, returns those to the
        commands that it is the first to contain.
        """
        started = time.perf_counter()
        self._revision = self.lease.renewal.checkpoint_revision
        trim = self._trim
        self._save(progress, more or {}, answers)
        if self._trim == trim and self._is_pressed():
            self._save(progress, more or {}, lambda _checkpoint_id: ())
        self._at_s, self._is_behind = time.monotonic(), False
        took_s = time.perf_counter() - started
        self.seconds += took_s
        metrics.CHECKPOINT_SECONDS.observe(took_s)

    @property
    def last_id(self) -> str:
        return self._lineage[-1].checkpoint_id if self._lineage else ""

    def _save(
        self,
        progress: Progress,
        more: Mapping[str, Tensor],
        answers: Callable[[str], tuple[Answer, ...]],
    ) -> None:
        self._serial += 1
        checkpoint_id = f"{self.learner_log.epoch:012d}-{self._serial:08d}"
        state = self.algorithm.state()
        try:
            digest = self.store.write(
                checkpoint_id, {**state.tensors, **more}, progress.to_json() | {"numbers": state.numbers}
            )
        except FileNotFoundError:
            # A learner that has taken over removes unfinished checkpoints.
            self.lease.confirm()
            raise
        # The version in the checkpoint; a newer one may have been drawn meanwhile.
        version = progress.log.version if progress.log is not None else 0
        append_lineage(self.lineage_path, self.ledger.entry(checkpoint_id, self.last_id, version))
        commit = Commit(
            checkpoint_id=checkpoint_id,
            manifest_sha256=digest,
            position=self.ledger.position,
            trim=max(self._unneeded, self._trim),
            totals=self.ledger.totals(),
            answers=answers(checkpoint_id),
        )
        failpoint("commit.before", commit.position)
        self.lease.patiently(lambda: self.learner_log.commit(commit))
        failpoint("commit.after", commit.position)
        self._lineage.append(commit)
        self._trim = commit.trim
        self._unneeded = self._needed_after(commit.position)
        self._consumed.forget_before(commit.trim)
        self._lineage = self._lineage[-self.store.keep :]
        self.store.prune([kept.checkpoint_id for kept in self._lineage], self._spared)
        metrics.CHECKPOINTS.inc()
        log.info("checkpoint committed", extra={"checkpoint": checkpoint_id, "position": commit.position})

    def _needed_after(self, position: int) -> int:
        """Return the newest entry that a resume at `position` does not need, with the algorithm as it is."""
        retained = self.algorithm.retain_from()
        return position if retained is None else min(position, retained - 1)

    def _is_pressed(self) -> bool:
        """Return whether checkpoints hold back much of the log that they could release."""
        free = self._needed_after(self.ledger.position)
        size = self._consumed.through(free) - self._consumed.through(self._trim)
        return size > PRESSURE * self.room.size or free - self._trim > PRESSURE * self.room.entries


class _Consumed:
    """The payload bytes of all entries consumed up to an entry, known at the ends of deliveries."""

    def __init__(self, trim: int, position: int, size: int) -> None:
        self._ends = [trim, position] if position > trim else [trim]
        self._sizes = [0, size] if position > trim else [size]

    def add(self, last: int, size: int) -> None:
        self._ends.append(last)
        self._sizes.append(self._sizes[-1] + size)

    def through(self, number: int) -> int:
        """Return the bytes up to the last end of a delivery at or before entry `number`."""
        place = bisect.bisect_right(self._ends, number) - 1
        return self._sizes[max(place, 0)]

    def forget_before(self, number: int) -> None:
        first = max(0, bisect.bisect_right(self._ends, number) - 1)
        del self._ends[:first], self._sizes[:first]


# ---- The choice of the checkpoint from which a learner begins, and its cost.
#
# The newest committed checkpoint that is whole on disk is taken; Redis knows which were committed. Only when
# Redis holds no run at all is another one taken: the newest whole one of the highest epoch. To begin before
# the trim floor loses experience and needs `--allow-loss`; the range is counted as `log_lost`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The state from which a learner begins.

    checkpoint, progress: None for a run that begins. lineage: commits up to it, oldest first. ledger: at the
    position where reading begins, with losses counted. catch_up_through: newest entry of newer weights in the
    log; 0: there is none.
    """

    checkpoint: Checkpoint | None = None
    progress: Progress | None = None
    lineage: tuple[Commit, ...] = ()
    ledger: Ledger
    catch_up_through: int = 0


def choose(lease: Lease, store: CheckpointStore, options: ResumeOptions) -> Beginning:
    """Return where to begin.

    Raises Fatal where there is nothing to begin from, or not without a loss that is not allowed; the message
    names the remedy. Raises RunFailed where the launcher must not restart the learner, because it would do so
    with other options (`ResumeOptions.after_a_crash`).
    """
    if not options.resume:
        return _begin(lease, store)
    known = [(commit.checkpoint_id, commit.manifest_sha256) for commit in reversed(lease.committed)]
    candidates = [(name, None) for name in store.ids()] if lease.fresh else known
    checkpoint = _best(store) if options.best else store.newest(candidates)
    store.name_ignored([commit.checkpoint_id for commit in lease.committed])
    progress = None if checkpoint is None else _progress(checkpoint)
    if checkpoint is None and lease.fresh and store.ids() and not options.allow_loss:
        raise Fatal(
            f"{store.directory}: no checkpoint is whole; --allow-loss begins the run again from nothing"
        )
    if not options.allow_loss and (_has_forgotten(lease, store) or (checkpoint is None and lease.trim_floor)):
        _refuse_a_redis_that_went_back(lease, store)
    ledger = Ledger() if progress is None else progress.ledger()
    _cross_floor(lease, ledger, allow_loss=options.allow_loss)
    log.info(
        "resuming",
        extra={"checkpoint": checkpoint.id if checkpoint else "none yet", "position": ledger.position},
    )
    return Beginning(
        checkpoint=checkpoint,
        progress=progress,
        lineage=_lineage(lease.committed, checkpoint, progress),
        ledger=ledger,
        # A Redis that restarted, or has no weights, needs them at once.
        catch_up_through=0 if lease.closed or not lease.version else lease.head,
    )


def _begin(lease: Lease, store: CheckpointStore) -> Beginning:
    if not lease.fresh:
        raise Fatal(
            "Redis holds this run already; go on with --resume, or start a new run with a Redis of its own"
        )
    if store.ids():
        raise Fatal(
            f"{store.directory} holds checkpoints of a run; go on with --resume, or choose another --run-dir"
        )
    return Beginning(ledger=Ledger())


def _refuse_a_redis_that_went_back(lease: Lease, store: CheckpointStore) -> None:
    """Raise Fatal where the folder has checkpoints newer than all commits in Redis, and the log was trimmed.

    Redis has lost commits: those that it has are of checkpoints that later ones have replaced.
    """
    known = [commit.checkpoint_id for commit in lease.committed]
    newest = next(iter(store.ids()), "")
    if known and newest > known[-1]:
        raise Fatal(
            f"{store.directory}: Redis has gone back in time: the newest checkpoint that it knows is "
            f"{known[-1]}, and the newest that is there is {newest}. Stop Redis, empty its folder and use "
            "--resume: an empty Redis is opened from the newest checkpoint, and what its log held is given "
            f"up. --allow-loss goes on from {known[-1]} instead, or from nothing where that is not whole"
        )


def _has_forgotten(lease: Lease, store: CheckpointStore) -> bool:
    """Return whether a checkpoint was committed that Redis does not know any more.

    A learner writes a checkpoint only when Redis has the one before it, so of each epoch one at most was not
    committed.
    """
    known = max((commit.checkpoint_id for commit in lease.committed), default="")
    newer = Counter(name.partition("-")[0] for name in store.ids() if name > known)
    return not lease.fresh and bool(known) and max(newer.values(), default=0) > 1


def _best(store: CheckpointStore) -> Checkpoint:
    checkpoint_id = store.best()
    if not checkpoint_id:
        raise RunFailed(
            f"{store.directory}: no checkpoint of a best evaluation; learner.keep_best=true keeps one, "
            "--resume alone goes on from the newest"
        )
    try:
        return store.read(checkpoint_id)
    except Damaged as error:
        raise RunFailed(f"the best checkpoint cannot be used: {error}") from error


def _progress(checkpoint: Checkpoint) -> Progress:
    try:
        return Progress.from_json(checkpoint.state)
    except (TypeError, KeyError, AttributeError) as error:
        raise Fatal(f"checkpoint {checkpoint.id}: state.json is of another version ({error!r})") from error


def _cross_floor(lease: Lease, ledger: Ledger, *, allow_loss: bool) -> None:
    first, floor = ledger.position + 1, lease.trim_floor
    if first > floor:
        return
    if not allow_loss:
        raise RunFailed(
            f"entries {first}..{floor} of the log are gone and no whole checkpoint has consumed them; "
            "--resume --allow-loss goes on without and books them log_lost"
        )
    log.error("going on with a loss", extra={"first": first, "last": floor})
    ledger.give_up(floor)


def _lineage(
    committed: Sequence[Commit], checkpoint: Checkpoint | None, progress: Progress | None
) -> tuple[Commit, ...]:
    if checkpoint is None or progress is None:
        return ()
    ids = [commit.checkpoint_id for commit in committed]
    if checkpoint.id in ids:
        return tuple(committed[: ids.index(checkpoint.id) + 1])
    unknown = Commit(
        checkpoint_id=checkpoint.id,
        manifest_sha256=checkpoint.manifest_sha256,
        position=progress.position,
        trim=progress.log.trim_floor if progress.log is not None else 0,
        totals=progress.totals,
    )
    return (unknown,)
