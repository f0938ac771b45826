"""The choice of the checkpoint from which a learner begins, and its cost.

A checkpoint counts when Redis says it was committed; the newest committed one that is whole on disk is
taken. Only when Redis holds no run at all may a checkpoint that Redis does not know count: the newest
whole one of the highest epoch. Beginning behind the trim floor loses experience for good and needs
`--allow-loss`; the range is counted as `log_lost`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.broker.log.replies import Commit, Lease
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore, Damaged
from penstock.learner.ledger import Ledger
from penstock.learner.progress import Progress
from penstock.runtime.exit import Fatal, RunFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The state from which a learner begins.

    checkpoint, progress: None for a run that begins. lineage: commits behind it, oldest first. ledger: at the
    position where reading begins, with losses counted already. resumed: asked to go on with a run.
    catch_up_through: newest entry that the log holds of newer weights than these; 0: nothing to catch up
    with. went_back: to a checkpoint that is not the newest, because an operator chose so.
    """

    checkpoint: Checkpoint | None
    progress: Progress | None
    lineage: tuple[Commit, ...]
    ledger: Ledger
    resumed: bool
    catch_up_through: int
    went_back: bool = False


def choose(lease: Lease, store: CheckpointStore, options: ResumeOptions) -> Beginning:
    """Return where to begin.

    Args:
        lease: as `LearnerLog.acquire` gave it.
        store: the folder of checkpoints.
        options: whether to resume, from the best checkpoint or the newest, and whether loss is permitted.

    Raises:
        Fatal: there is nothing to begin from without loss or without permission; the message names the
            remedy. It is RunFailed where another try would not ask for the same: after a death a learner goes
            on from the newest checkpoint, whatever it was first asked for.
    """
    if not options.resume:
        return _begin(lease, store)
    checkpoint = _best(store) if options.best else store.newest(_candidates(lease, store))
    store.name_ignored([commit.checkpoint_id for commit in lease.committed])
    progress = None if checkpoint is None else _progress(checkpoint)
    if checkpoint is None and lease.fresh and store.ids() and not options.allow_loss:
        raise Fatal(
            f"{store.directory}: no checkpoint is whole; --allow-loss begins the run again from nothing"
        )
    if checkpoint is None and lease.trim_floor and not options.allow_loss:
        _refuse_a_redis_that_went_back(lease, store)
    position = progress.position if progress is not None else 0
    ledger = Ledger(position, progress.totals if progress is not None else None)
    _cross_floor(lease, ledger, allow_loss=options.allow_loss)
    log.info(
        "resuming",
        extra={"checkpoint": checkpoint.id if checkpoint else "none yet", "position": ledger.position},
    )
    return Beginning(
        checkpoint=checkpoint,
        progress=progress,
        lineage=_lineage(lease.committed, checkpoint),
        ledger=ledger,
        resumed=True,
        # A Redis that restarted or never held weights needs them at once.
        catch_up_through=0 if lease.closed or not lease.version else lease.head,
        went_back=options.best,
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
    # No learner has published anything of a run that begins, so there is nothing to catch up with.
    return Beginning(
        checkpoint=None, progress=None, lineage=(), ledger=Ledger(), resumed=False, catch_up_through=0
    )


def _refuse_a_redis_that_went_back(lease: Lease, store: CheckpointStore) -> None:
    """Raise Fatal where the folder is newer than all that Redis knows of it, and the log was trimmed.

    The commits that Redis has are of checkpoints that later ones, which it has forgotten, have replaced.
    """
    known = [commit.checkpoint_id for commit in lease.committed]
    newest = next(iter(store.ids()), "")
    if known and newest > known[-1]:
        raise Fatal(
            f"{store.directory}: Redis has gone back in time: the newest checkpoint that it knows is "
            f"{known[-1]}, which is not whole there any more, and the newest that is there is {newest}. Stop "
            "Redis, empty its folder and use --resume: an empty Redis is opened from the newest checkpoint, "
            "and what its log held is given up. --allow-loss begins from nothing instead"
        )


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


def _candidates(lease: Lease, store: CheckpointStore) -> list[tuple[str, str | None]]:
    if lease.fresh:
        return [(checkpoint_id, None) for checkpoint_id in store.ids()]
    return [(commit.checkpoint_id, commit.manifest_sha256) for commit in reversed(lease.committed)]


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


def _lineage(committed: Sequence[Commit], checkpoint: Checkpoint | None) -> tuple[Commit, ...]:
    if checkpoint is None:
        return ()
    ids = [commit.checkpoint_id for commit in committed]
    if checkpoint.id in ids:
        return tuple(committed[: ids.index(checkpoint.id) + 1])
    progress = _progress(checkpoint)
    unknown = Commit(
        checkpoint_id=checkpoint.id,
        manifest_sha256=checkpoint.manifest_sha256,
        position=progress.position,
        trim=progress.log.trim_floor if progress.log is not None else 0,
        totals=progress.totals,
    )
    return (unknown,)
