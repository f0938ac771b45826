"""The learner as a process, from its first line to its exit code.

It needs no broker and no actor. It ends when the target is reached, the steps are done, an operator stops the
run or the process is drained, each time after a committed checkpoint; a learner that was fenced off raises
Fatal and writes nothing more. Under torchrun it is one rank of several (`penstock.learner.ranks`).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.config.credentials import redis_password, tls_files
from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.learner import Learner
from penstock.learner.model import Model, device_of, make_model, use_threads
from penstock.learner.ranks.roles import RankPlace, Ranks, follow, meet, place_of
from penstock.learner.recorder import check_installed
from penstock.registry.weight_files import hold
from penstock.runtime import logs
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle, share_interpreter
from penstock.runtime.retry import Interrupted

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
    """Run the learner, or one rank of it; returns its exit code, raises Fatal or ConfigurationError.

    resumption: whether to resume the run, and from which checkpoint.
    make: makes the model; None: that of the settings, for all ranks.
    """
    if not settings.run:
        raise ConfigurationError("run='': name the run; actors, checkpoints and Redis know it by its name")
    check_installed(settings.metrics.trackers)
    place = place_of(os.environ)
    health = _show(place, settings)
    share_interpreter()
    use_threads(settings)
    device = device_of(settings, place.on_host)
    meeting = meet(place, settings, device) if place.size > 1 else None

    def connect() -> LearnerLog:
        return LearnerLog.connect(
            redis_url,
            wait_s=settings.broker.redis_wait_s,
            stop=lifecycle.draining,
            password=redis_password(settings.security),
            tls=tls_files(settings.security),
        )

    if make is None:
        make = partial(make_model, group=None if meeting is None else meeting.group, device=device)
    if meeting is not None and place.rank:
        return follow(lifecycle, settings, meeting, make(settings), health, connect)
    with Ranks(meeting, lifecycle.drain) as ranks:
        model = make(settings)
        with held_folder(run_dir, lifecycle.draining) as is_held:
            learner = Learner(
                settings, model, run_dir, ranks=ranks, health=health, draining=lifecycle.draining
            )
            try:
                learner.open(connect, resumption, is_held=is_held)
            except Interrupted:
                return EXIT_OK
            learner.run()
    return EXIT_OK


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
def held_folder(run_dir: Path, draining: threading.Event) -> Iterator[bool]:
    """Hold the run's folder, so that `penstock policy` knows that a learner of the run lives.

    Yields whether this process holds it. A command that draws a version's number holds the folder briefly,
    which is awaited; another learner holds it for its life.
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
