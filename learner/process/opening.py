"""What precedes learning: the folder is held, the lease taken, the state restored, the log opened.

    held_folder → Redis → lease → checkpoint chosen → algorithm restored → log opened at its position

What is left when it ends between two of these steps is nothing, or a lease that its successor takes over.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Lease, LogState
from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.algorithms.algorithm import AlgorithmState
from penstock.learner.checkpoint.resume import Beginning, choose
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import BEST, CheckpointStore
from penstock.learner.lease import acquire, fenced
from penstock.learner.model.model import Model, check_memory
from penstock.learner.progress import check_same, sections
from penstock.learner.publish.final_policy import write_specification
from penstock.protocol.refusal import Refused
from penstock.registry.weight_files import hold
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint

log = logging.getLogger(__name__)

_FOLDER_WAIT_S: Final = 5.0
_FOLDER_LOOK_S: Final = 0.05
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Another one after each boot of the machine; a file of Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run of which this process holds the lease, whose algorithm is restored and whose log is open."""

    settings: Settings
    model: Model
    learner_log: LearnerLog
    store: CheckpointStore
    beginning: Beginning
    run_dir: Path


@contextmanager
def held_folder(run_dir: Path, draining: threading.Event) -> Iterator[bool]:
    """Hold the run's folder, so that `penstock policy` knows that a learner of the run lives.

    Yields whether it is held here. A command that draws a version's number holds it for a moment, which is
    waited for; another learner holds it for its life.
    """
    until_s = time.monotonic() + _FOLDER_WAIT_S
    while (file := hold(run_dir)) is None:
        if time.monotonic() > until_s or draining.wait(_FOLDER_LOOK_S):
            log.warning("another process holds the run's folder", extra={"folder": str(run_dir)})
            break
    try:
        yield file is not None
    finally:
        if file is not None:
            file.close()


def open_run(
    settings: Settings,
    model: Model,
    connect: Callable[[], LearnerLog],
    run_dir: Path,
    resumption: ResumeOptions,
    draining: threading.Event,
    *,
    is_held: bool,
) -> OpenedRun:
    """Take the lease, restore the algorithm and open the log; waits for Redis and for the lease.

    Args:
        settings: of the run.
        model: policy and algorithm as they are made, which are restored in place.
        connect: opens a connection to the log; called once.
        run_dir: the run's folder, with its checkpoints.
        resumption: whether the run is gone on with, and from which checkpoint.
        draining: ends the waiting.
        is_held: whether the folder is held by this process.

    Raises:
        Interrupted: the process is asked to end while it waits.
        ConfigurationError: another learner has the run in hand, or a checkpoint does not fit the settings.
        Fatal: there is nothing to begin from, or another learner has taken over.
    """
    learner_log, lease = _take_lease(settings, model, connect, run_dir, draining, is_held=is_held)
    store = CheckpointStore(
        run_dir / "checkpoints",
        settings.learner.keep_checkpoints,
        compress=settings.learner.checkpoint_compression == "lz4",
    )
    beginning = choose(lease, store, resumption)
    _restore(model, beginning, settings)
    write_specification(run_dir, model.specification)
    _open(learner_log, lease, model, beginning)
    return OpenedRun(
        settings=settings,
        model=model,
        learner_log=learner_log,
        store=store,
        beginning=beginning,
        run_dir=run_dir,
    )


def _take_lease(
    settings: Settings,
    model: Model,
    connect: Callable[[], LearnerLog],
    run_dir: Path,
    draining: threading.Event,
    *,
    is_held: bool,
) -> tuple[LearnerLog, Lease]:
    """Wait for Redis, then for the lease; raises Interrupted where the process is asked to end meanwhile.

    Where the folder is held by another learner (`is_held` False), that one may be frozen: it has lost its
    lease then, and is fenced. Under one name the two would fence each other off in turn, so this one takes
    another name. Raises ConfigurationError when the other one renews its lease.
    """
    learner_log = connect()
    check_memory(settings, model.weight_bytes, learner_log.max_memory_bytes())
    holder = holder_of(run_dir) if is_held else f"{holder_of(run_dir)}:{secrets.token_hex(4)}"
    ttl_s = settings.learner.lease_ttl_s
    try:
        lease = acquire(learner_log, settings.run, holder, ttl_s, draining, is_patient=is_held)
    except Refused as error:
        raise ConfigurationError(
            f"run_dir={run_dir}: another learner has this run in hand ({error.refusal.detail}); "
            "stop it first, or give this one a folder of its own"
        ) from error
    failpoint("lease.acquired", lease.epoch)
    metrics.LEASE_EPOCH.set(lease.epoch)
    log.info("lease taken", extra={"epoch": lease.epoch, "holder": holder})
    return learner_log, lease


def holder_of(run_dir: Path) -> str:
    """Return the name under which every process of the learner of this folder holds its lease.

    Because it is the same, a restarted learner takes its own lease over at once. Host name and path may be
    those of another machine too, as of containers: under one name both would take the lease from one another
    for ever. So the name holds the folder itself and the boot of its machine as well.
    """
    folder = run_dir.stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()}:{run_dir.resolve()}:{folder.st_dev}-{folder.st_ino}:{boot[:8]}"


def _restore(model: Model, beginning: Beginning, settings: Settings) -> None:
    if beginning.checkpoint is None or beginning.progress is None:
        return
    check_same(settings.run, beginning.progress.sections, sections(settings))
    tensors = {name: tensor for name, tensor in beginning.checkpoint.tensors.items() if name != BEST}
    state = AlgorithmState(tensors=tensors, numbers=beginning.progress.numbers)
    try:
        model.algorithm.load(state)
    except ValueError as error:
        raise ConfigurationError(
            f"checkpoint {beginning.checkpoint.id} does not fit the settings ({error}); "
            "resume with the `algorithm` and `policy` that the run was begun with"
        ) from error


def _open(learner_log: LearnerLog, lease: Lease, model: Model, beginning: Beginning) -> None:
    known = beginning.progress.log if beginning.progress is not None else None
    state: LogState | None = None
    if known is not None:
        # The checkpoint holds the log as it was before its own commit.
        state = replace(known, commits=(*known.commits, beginning.lineage[-1]))
    if lease.closed and not lease.fresh:
        log.warning("Redis was restarted: opening the log again")
    try:
        learner_log.start(
            model.specification.encode(), model.pacing, resume=state, position=beginning.ledger.position
        )
    except Refused as error:
        raise fenced(error) from error
    failpoint("log.opened", beginning.ledger.position)
