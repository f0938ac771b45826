"""Versions to keep: registered, their bytes on disk and pinned in Redis, off the learner's critical path.

    best      an evaluation with a higher mean than any before    (offered by the thread of the episodes)
    periodic  what a run begins with, and every `learner.keep_every_updates` updates, where that is set
              (the publisher's thread)
    final     the version that the process ends with              (`finish`, in the loop's thread)

Offers wait here; a thread of this module writes the file, then registers, then has `registry_sync` make Redis
and the folder follow the registry, at least every POLL_S, including changes by operators. A registry that
does not answer or a full disk is logged and counted, and tried again at the next round: learning goes on. A
refused write to Redis ends the process as everywhere.

The first round imports SQLAlchemy, which takes the interpreter from the loop for half a second. So it comes
with the first version, unless there is a registry already that has to be followed.
"""

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from penstock.broker.log.kept_weights import KeptWeights
from penstock.config.settings import Settings
from penstock.learner.evaluation.evaluation import Result
from penstock.learner.lease import LeaseKeeper
from penstock.learner.progress import Progress
from penstock.learner.publish.registry_sync import BY, RegistrySync
from penstock.learner.publish.version_candidate import Lineage, VersionCandidate, best, lineage_of, periodic
from penstock.protocol.messages import Publication
from penstock.registry.records import (
    MAX_EVENTS,
    Action,
    Evaluation,
    NewVersion,
    Origin,
    PolicyVersion,
    Status,
)
from penstock.registry.registry_errors import DifferentBytes, RegistryError, TooManyPinned
from penstock.registry.weight_files import forget_unfinished, write_kept
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from penstock.registry.registry import Registry

POLL_S: Final = 2.0
"""Seconds within which changes by operators reach Redis and the folder."""
_DECISIONS: Final = (Action.PROMOTED, Action.ROLLED_BACK, Action.TRAFFIC)
MAX_WAITING: Final = 4
"""Most offers that wait for a registry which does not answer: the newest, and the oldest, which may be what
the run began with."""

log = logging.getLogger(__name__)


class KeptVersions:
    """Registers versions and holds their bytes: call `run` in a thread.

    Call `begin` before the first publication, and `finish` at the end.

    Args:
        lineage: the run behind the versions.
        registry_sync: makes Redis and the folder follow the registry.
        stop: ends `run`.
    """

    def __init__(self, lineage: Lineage, registry_sync: RegistrySync, stop: threading.Event) -> None:
        self._lineage = lineage
        self._registry_sync = registry_sync
        self._stop = stop
        self._hasten = threading.Event()
        self._changed = threading.Lock()
        self._serial = threading.Lock()
        self._waiting: list[VersionCandidate] = []
        self._own: list[int] = []
        self._periods: int | None = None
        self._registry: Registry | None = None
        self._failure = ""

    @classmethod
    def of_run(
        cls, settings: Settings, run_dir: Path, progress: Progress, kept: KeptWeights, lease: LeaseKeeper,
        stop: threading.Event,
    ) -> Self:  # fmt: skip
        """Return the versions of a run with these settings, in a process that begins at `progress`.

        kept: the weights of kept versions in Redis. lease: the lease under which they are written.
        """
        lineage = lineage_of(settings, run_dir, progress)
        sync = RegistrySync(kept, lease, lineage.run, lineage.policy, run_dir, shared=lineage.shared)
        return cls(lineage, sync, stop)

    def begin(self) -> None:
        """Follow a registry that exists already: no number that it holds is drawn again."""
        forget_unfinished(self._lineage.run_dir)
        if self._is_there():
            self._poll()

    def published(self, publication: Publication, blob: bytes) -> None:
        """Offer the published weights when a periodic version is due."""
        if self._lineage.keep_every is None:
            return
        periods = publication.update // self._lineage.keep_every
        before, is_first = self._periods, publication.update == 0
        is_due = is_first if before is None else periods > before
        self._periods = periods
        if is_due:
            self.offer(periodic(publication, blob, self._lineage.keep_every))

    def evaluated(self, result: Result) -> None:
        """Offer the evaluated version; it is registered unless one before was at least as good."""
        self.offer(best(result))

    def offer(self, candidate: VersionCandidate) -> None:
        """Register a version as soon as possible; never waits."""
        with self._changed:
            oldest, *others = [*self._waiting, candidate]
            self._waiting = [oldest, *others[1 - MAX_WAITING :]]
        self._hasten.set()

    def wake(self) -> None:
        """Wake the thread for a round, or for the end."""
        self._hasten.set()

    def run(self) -> None:
        """Make rounds until `stop`."""
        while True:
            self._hasten.wait(POLL_S)
            self._hasten.clear()
            if self._stop.is_set():
                return
            if self._waiting or self._is_there():
                self._poll()

    def finish(self, candidate: VersionCandidate | None) -> None:
        """Register the version that the process ends with, and the offers that still wait, in this thread."""
        if candidate is not None:
            self.offer(candidate)
        self._poll()
        with self._changed:
            left = [one.publication.version for one in self._waiting]
        if left:
            log.error("versions that are not registered: the registry failed", extra={"versions": left})
        if self._registry is not None:
            self._registry.close()

    # ---- one look

    def _is_there(self) -> bool:
        """Return whether there may be decisions to follow: on a server, or in a file that somebody made."""
        url = self._lineage.url
        file = url.removeprefix("sqlite:///")
        return file == url or Path(file).exists()

    def _poll(self) -> None:
        with self._serial:
            try:
                registry = self._opened()
                self._register_all(registry)
                self._registry_sync.follow(registry)
            except _failures() as error:
                self._note(error)
            else:
                self._failure = ""

    def _opened(self) -> "Registry":
        from penstock.registry.registry import Registry  # noqa: PLC0415

        if self._registry is None:
            self._lineage.run_dir.mkdir(parents=True, exist_ok=True)
            self._registry = Registry.open(self._lineage.url, migrate=True)
        return self._registry

    def _register_all(self, registry: "Registry") -> None:
        with self._changed:
            waiting = list(self._waiting)
        if waiting:
            self._registry_sync.confirm()
        for candidate in waiting:
            try:
                self._register(registry, candidate)
            except (DifferentBytes, TooManyPinned) as error:
                self._note(error)  # would be refused again
            with self._changed:
                self._waiting = [one for one in self._waiting if one is not candidate]

    def _register(self, registry: "Registry", candidate: VersionCandidate) -> None:
        policy, version = self._lineage.policy, candidate.publication.version
        known = {one.version: one for one in registry.list(policy) if one.run == self._lineage.run}
        others = [one.evaluation.mean for one in known.values() if one.evaluation and one.version != version]
        is_new = version not in known
        if is_new and candidate.origin is Origin.BEST and not _beats(candidate.evaluation, others):
            return
        if is_new:
            failpoint("keep.writing", version)
            write_kept(self._lineage.run_dir, version, candidate.blob)
            failpoint("keep.registering", version)
            registry.register(self._row(candidate), by=BY, make_room=True)
            self._own.append(version)
            log.info("version kept", extra={"version": version, "origin": candidate.origin.value})
        elif candidate.evaluation not in (None, known[version].evaluation):
            registry.record_evaluation(policy, version, candidate.evaluation, by=BY)
        if candidate.origin is not Origin.PERIODIC and self._lineage.activate_first:
            self._activate(registry, version, is_last=candidate.origin is Origin.FINAL)

    def _row(self, candidate: VersionCandidate) -> NewVersion:
        publication, lineage = candidate.publication, self._lineage
        before = [version for version in (lineage.parent or 0, *self._own) if version < publication.version]
        return NewVersion(
            policy=lineage.policy,
            version=publication.version,
            run=lineage.run,
            update=publication.update,
            sha256=publication.sha256,
            size_bytes=publication.size,
            configuration=lineage.configuration,
            origin=candidate.origin,
            parent=max(before, default=0) or None,
            evaluation=candidate.evaluation,
            reason=candidate.reason,
            place=str(lineage.run_dir.resolve()) if lineage.shared else "",
        )

    def _activate(self, registry: "Registry", version: int, *, is_last: bool) -> None:
        """Make the first version active, and at the end the best one.

        An operator's earlier decision stays.
        """
        policy = self._lineage.policy
        active = registry.active(policy)
        if active is None:
            if registry.get(policy, version).status is Status.CANDIDATE:
                registry.promote(policy, version, "the first version worth serving", by=BY)
        elif is_last and self._decides_alone(registry):
            top = _best(registry.pinned(policy), self._lineage.run)
            if top is not None and top.version != active.version and top.run == active.run:
                registry.promote(policy, top.version, "the best version of a run that has ended", by=BY)

    def _decides_alone(self, registry: "Registry") -> bool:
        """Return whether only a learner has ever decided which version is active."""
        events = registry.events(self._lineage.policy, MAX_EVENTS)
        return all(event.by == BY for event in events if event.action in _DECISIONS)

    def _note(self, error: Exception) -> None:
        metrics.REGISTRY_FAILURES.inc()
        if str(error) != self._failure:
            log.error("the registry of versions failed; learning goes on", extra={"error": str(error)})
        self._failure = str(error)


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors of a round that fails; called late, because it imports SQLAlchemy."""
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    return (RegistryError, SQLAlchemyError, OSError, ValueError)


def _best(pinned: Iterable[PolicyVersion], run: str) -> PolicyVersion | None:
    """Return the first of those that did best among a run's versions which may serve.

    Returns None where none was evaluated.
    """
    allowed = (Status.ACTIVE, Status.CANDIDATE)
    evaluated = [
        (one.evaluation.mean, -one.version, one)
        for one in pinned
        if one.evaluation and one.run == run and one.status in allowed
    ]
    return max(evaluated)[2] if evaluated else None


def _beats(evaluation: Evaluation | None, others: list[float]) -> bool:
    return evaluation is not None and all(evaluation.mean > other for other in others)
