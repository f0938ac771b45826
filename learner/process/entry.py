"""The learner as a process: takes the lease, begins or resumes the run, learns, leaves the books.

Waits for Redis and for the lease; needs no broker and no actor to be up. Returns when the target is
reached, the steps are done, an operator stopped the run or the process is asked to drain, each after a
committed checkpoint. A learner that was fenced off, or that cannot go on, raises Fatal and writes
nothing more. After a crash, `resume` goes on from the newest committed checkpoint.

Under torchrun it is one rank of several: rank 0 is the learner, the others compute with it (`learner.ranks`).
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from broker.log.learner_log import LearnerLog
from broker.log.learner_records import Lease, LogState
from learner.algorithms.algorithm import AlgorithmState
from learner.checkpoint.resume import Beginning, choose
from learner.checkpoint.resume_options import ResumeOptions
from learner.checkpoint.store import BEST, CheckpointStore
from learner.lease import acquire, fenced
from learner.model.capacity_checks import check_memory
from learner.model.device import device_of, use_threads
from learner.model.model import Model, make_model
from learner.process.assembly import Foundation, Learner
from learner.progress import check_same, sections
from learner.publish.final_policy import write_specification
from learner.ranks.following import follow
from learner.ranks.leading import LeadingRank, Ranks, SingleRank
from learner.ranks.rendezvous import RankPlace, meet, place_of
from learner.reporting.trackers.tracker import check_installed
from penstock.config.credentials import redis_password, tls_files
from penstock.config.settings import ConfigurationError, Settings
from penstock.registry.weight_files import hold
from penstock.runtime import logs, metrics
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.failpoint import failpoint
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.wire.refusal import Refused

log = logging.getLogger(__name__)

_FOLDER_WAIT_S: Final = 5.0
_FOLDER_LOOK_S: Final = 0.05


def main(
    lifecycle: Lifecycle,
    settings: Settings,
    *,
    redis_url: str,
    run_dir: Path,
    resumption: ResumeOptions,
    make: Callable[[Settings], Model] | None = None,
) -> int:
    """Run the learner, or one rank of it, and return its exit code.

    Raises Fatal or ConfigurationError, as `run_service` expects.

    resumption: whether the run is gone on with, and from which checkpoint.
    make: what is learned, and by which algorithm; None: what the settings say, by all ranks.
    """
    if not settings.run:
        raise ConfigurationError("run='': name the run; actors, checkpoints and Redis know it by its name")
    check_installed(settings.metrics.trackers)
    place = place_of(os.environ)
    health = _show(place, settings)
    use_threads(settings)
    device = device_of(settings, place.on_host)
    meeting = meet(place, settings, device) if place.size > 1 else None
    connect = partial(_connect, settings, redis_url, lifecycle)
    if make is None:
        make = partial(make_model, group=None if meeting is None else meeting.group, device=device)
    if meeting is not None and place.rank:
        return follow(lifecycle, settings, meeting, make(settings), health, connect)
    ranks: Ranks = SingleRank() if meeting is None else LeadingRank(meeting, lifecycle.drain)
    with _others_ended(ranks):
        model = make(settings)
        with held_folder(run_dir, lifecycle.draining) as is_held:
            try:
                learner_log, lease = _take_lease(
                    settings, model, connect, run_dir, lifecycle.draining, is_held=is_held
                )
            except Interrupted:
                return EXIT_OK
            store = CheckpointStore(run_dir / "checkpoints", settings.learner.keep_checkpoints)
            beginning = choose(lease, store, resumption)
            _restore(model, beginning, settings)
            write_specification(run_dir, model.specification)
            _open(learner_log, lease, model, beginning)
            foundation = Foundation(
                settings=settings,
                model=model,
                learner_log=learner_log,
                store=store,
                beginning=beginning,
                run_dir=run_dir,
                health=health,
                draining=lifecycle.draining,
                ranks=ranks,
            )
            Learner(foundation).run()
    return EXIT_OK


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
    holder = _holder(run_dir) if is_held else f"{_holder(run_dir)}:{secrets.token_hex(4)}"
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


def _show(place: RankPlace, settings: Settings) -> Health:
    """Serve metrics and health of this process; ranks of one machine have neighbouring ports."""
    role = "rank" if place.rank else "learner"
    if place.rank:
        run = settings.run if settings.logs.format == "json" else None
        logs.configure(f"rank-{place.rank}", run, style=settings.logs.format)
    health = Health(role)
    wanted = settings.metrics.port and settings.metrics.port + place.on_host
    _, port = serve_http(health, settings.metrics.host, wanted)
    announce(role, metrics_port=port, rank=place.rank)
    return health


@contextmanager
def _others_ended(ranks: Ranks) -> Iterator[None]:
    """Whatever becomes of rank 0, the others end with it."""
    try:
        yield
    except BaseException:
        ranks.end(failed=True)
        raise
    ranks.end(failed=False)


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


def _connect(settings: Settings, redis_url: str, lifecycle: Lifecycle) -> LearnerLog:
    return LearnerLog.connect(
        redis_url,
        wait_s=settings.broker.redis_wait_s,
        stop=lifecycle.draining,
        password=redis_password(settings.security),
        tls=tls_files(settings.security),
    )


def _holder(run_dir: Path) -> str:
    """Return the name under which every process of this learner holds its lease.

    Because it is the same, a restarted learner takes its own lease over at once.
    """
    return f"{socket.gethostname()}:{run_dir.resolve()}"


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
