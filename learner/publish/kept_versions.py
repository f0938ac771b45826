"""Versions that are kept: registered, with their bytes on disk and pinned in Redis, in a thread of its own.

    best      an evaluation with a higher mean than any before         (offered by the thread of the episodes)
    periodic  the first version, and one every `learner.keep_every_updates` updates  (the publisher's thread)
    final     the version that the process ends with                   (`finish`, in the main thread)

The thread writes the file, registers the version, and then makes Redis and the folder follow the registry, at
least every POLL_S. A registry that does not answer, or a full disk, is logged and counted, and the thread
tries again: learning continues. A write that Redis refuses ends the process. The first round imports
SQLAlchemy, which blocks the interpreter for half a second: it comes with the first version, or at the start
where a registry exists already.
"""

import base64
import json
import logging
import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.config.credentials import registry_with_password
from penstock.learner.ledger import Progress, configuration_hash
from penstock.policy import weights
from penstock.protocol.messages import Publication
from penstock.protocol.specification import RunSpecification
from penstock.registry import records, weight_files
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint
from penstock.runtime.output_file import replace_file

# ---- The policy that a run ends with, as files that need no broker: `final.safetensors` and `policy.json`.
#
# `policy.json` holds the encoded run specification from the start of the run on, and at its end the version
# of the weights and their digest, which reveals a pair that does not belong together.

_BLOB: Final = "final.safetensors"
_ENDED: Final = ("version", "update", "sha256")
"""Fields of the description that are known when a run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalPolicy:
    """The weights that a run ends with.

    blob: safetensors. version: of its publication. update: updates behind it.
    """

    specification: RunSpecification
    blob: bytes
    version: int
    update: int


def write_specification(run_dir: Path, specification: RunSpecification) -> None:
    """Describe a run that begins or goes on; the record of an earlier end is preserved."""
    path = run_dir / weight_files.FOLDER / weight_files.DESCRIPTION
    try:
        before = json.loads(path.read_bytes())
    except (OSError, ValueError):
        before = {}
    known = {name: before[name] for name in _ENDED} if before.keys() >= set(_ENDED) else {}
    _write_description(path, specification, known)


def write_final(run_dir: Path, final: FinalPolicy) -> None:
    """Replace the run's final policy; raises OSError."""
    folder = run_dir / weight_files.FOLDER
    replace_file(folder / _BLOB, final.blob)
    name_final(run_dir)
    known = {"version": final.version, "update": final.update, "sha256": weights.sha256(final.blob)}
    _write_description(folder / weight_files.DESCRIPTION, final.specification, known)


def name_final(run_dir: Path) -> None:
    """Point the link `latest` to the final policy; a version that is kept after it would take its place."""
    weight_files.name_latest(run_dir, _BLOB)


def _write_description(path: Path, specification: RunSpecification, known: Mapping[str, Any]) -> None:
    description = {
        "run": specification.run,
        "seed": specification.seed,
        "workload": specification.workload,
        "environment": json.loads(specification.environment_json),
        "policy": json.loads(specification.policy_json),
        "observation_space": repr(specification.observation_space),
        "action_space": repr(specification.action_space),
        **known,
        "specification": base64.b64encode(specification.encode()).decode(),
    }
    replace_file(path, (json.dumps(description, indent=2) + "\n").encode())


def read_final(run_dir: Path) -> FinalPolicy:
    """Return the final policy of a run; raises ValueError that says what is missing or damaged."""
    folder = run_dir / weight_files.FOLDER
    try:
        description = json.loads((folder / weight_files.DESCRIPTION).read_bytes())
        blob = (folder / _BLOB).read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: not there; has the run ended?") from error
    if not description.keys() >= set(_ENDED):
        raise ValueError(f"{folder / weight_files.DESCRIPTION}: names no final version; has the run ended?")
    if weights.sha256(blob) != description["sha256"]:
        raise ValueError(
            f"{folder / _BLOB}: its SHA-256 is not the one in {weight_files.DESCRIPTION}; resume the run to "
            "repair"
        )
    return FinalPolicy(
        specification=RunSpecification.decode(base64.b64decode(description["specification"])),
        blob=blob,
        version=int(description["version"]),
        update=int(description["update"]),
    )


if TYPE_CHECKING:
    # They load the Redis client, which `penstock evaluate` does without.
    from penstock.learner.evaluation import Candidate, Result
    from penstock.learner.evaluation import Evaluation as CandidateEvaluation
    from penstock.learner.learner import Learner
    from penstock.registry.registry import Registry


BY: Final = "learner"

log = logging.getLogger(__name__)


POLL_S: Final = 2.0
"""Seconds within which changes by operators reach Redis and the folder."""
_DECISIONS: Final = (records.Action.PROMOTED, records.Action.ROLLED_BACK, records.Action.TRAFFIC)
MAX_WAITING: Final = 4
"""Most versions that wait for a registry which does not answer: the newest and the oldest, with which the run
may have begun."""


class KeptVersions:
    """Registers versions and holds their bytes: call `run` in a thread.

    Call `begin` before the first publication, and `finish` at the end.
    """

    def __init__(self, learner: "Learner", progress: Progress) -> None:
        settings = learner.settings
        self._run, self._policy, self._run_dir = settings.run, settings.serving.policy, learner.run_dir
        self._kept, self._lease, self._stop = learner.learner_log.kept, learner.lease, learner.stop
        self._url = weight_files.registry_url(self._run_dir, registry_with_password(settings.registry))
        # Other runs may register versions of this policy, so that numbers are reserved for this one.
        self._is_shared = bool(settings.registry.url)
        self._configuration = configuration_hash(settings)
        self._parent = progress.log.version if progress.log is not None else 0
        self._keep_every = settings.learner.keep_every_updates
        self._activate_first = settings.registry.activate_first
        self._hasten = threading.Event()
        self._changed = threading.Lock()
        self._serial = threading.Lock()
        self._waiting: list[tuple[records.NewVersion, bytes]] = []
        self._own: list[int] = []
        self._periods: int | None = None
        self._highest = 0
        self._revision: int | None = None
        self._unreadable: set[int] = set()
        self._registry: Registry | None = None
        self._failure = ""

    def begin(self) -> None:
        """Follow a registry that exists already: no number that it holds is drawn again."""
        weight_files.forget_unfinished(self._run_dir)
        if self._is_there():
            self._poll()

    def published(self, publication: Publication, blob: bytes) -> None:
        """Offer a publication with which a period of `learner.keep_every_updates` begins."""
        if self._keep_every is None:
            return
        periods = publication.update // self._keep_every
        before, is_first = self._periods, publication.update == 0
        is_due = is_first if before is None else periods > before
        self._periods = periods
        if is_due:
            reason = f"every {self._keep_every} updates"
            self._offer(publication, blob, records.Origin.PERIODIC, reason)

    def evaluated(self, result: "Result") -> None:
        """Offer the evaluated version; it is registered unless one before was at least as good."""
        reason = f"mean return {result.mean:g} over {result.counted.episodes} episodes"
        of = result.candidate
        self._offer(_publication(of), of.blob, records.Origin.BEST, reason, result)

    def _offer(
        self,
        publication: Publication,
        blob: bytes,
        origin: records.Origin,
        reason: str,
        result: "Result | None" = None,
    ) -> None:
        """result: its evaluation, which is recorded where an environment's returns have a finite mean."""
        score, evaluation = None if result is None else result.counted, None
        if score is not None and math.isfinite(score.mean) and math.isfinite(score.std):
            evaluation = records.Evaluation(**asdict(score))
        try:
            row = records.NewVersion(
                policy=self._policy,
                version=publication.version,
                run=self._run,
                update=publication.update,
                sha256=publication.sha256,
                size_bytes=publication.size,
                configuration=self._configuration,
                origin=origin,
                evaluation=evaluation,
                reason=reason,
                place=str(self._run_dir.resolve()) if self._is_shared else "",
            )
        except ValueError as error:  # such as a name of a policy that is no id: learning continues
            self._note(error)
            return
        with self._changed:
            oldest, *others = [*self._waiting, (row, blob)]
            self._waiting = [oldest, *others[1 - MAX_WAITING :]]
        self._hasten.set()

    def wake(self) -> None:
        self._hasten.set()

    def run(self) -> None:
        while True:
            self._hasten.wait(POLL_S)
            self._hasten.clear()
            if self._stop.is_set():
                return
            if self._waiting or self._is_there():
                self._poll()

    def finish(
        self, final: FinalPolicy, evaluation: "CandidateEvaluation", newest: Publication, why: str
    ) -> None:
        """Register the final policy and the versions that still wait, in this thread.

        The final policy is left out where these weights were not published under that version. newest:
        publication. why: reason for which the learner ended.
        """
        results = [one for one in (evaluation.solved, evaluation.last, evaluation.best) if one]
        # The best version may have been published again: the same bytes were evaluated under another number.
        evaluated = next((one for one in results if one.candidate.blob == final.blob), None)
        publication = _publication(final)
        if publication == newest or final.version in {one.candidate.version for one in results}:
            reason = f"the learner ended: {why}"
            self._offer(publication, final.blob, records.Origin.FINAL, reason, evaluated)
        self._poll()
        with self._changed:
            left = [row.version for row, _ in self._waiting]
        if left:
            log.error("versions that are not registered: the registry failed", extra={"versions": left})
        if self._registry is not None:
            self._registry.close()

    # ---- one look

    def _is_there(self) -> bool:
        """Return whether the registry may hold decisions: it is a server, or its file exists."""
        file = self._url.removeprefix("sqlite:///")
        return file == self._url or Path(file).exists()

    def _poll(self) -> None:
        with self._serial:
            try:
                registry = self._opened()
                self._register_all(registry)
                self._follow(registry)
            except _failures() as error:
                self._note(error)
            else:
                self._failure = ""

    def _opened(self) -> "Registry":
        from penstock.registry.registry import Registry  # noqa: PLC0415

        if self._registry is None:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._registry = Registry.open(self._url, migrate=True)
        return self._registry

    def _register_all(self, registry: "Registry") -> None:
        with self._changed:
            waiting = list(self._waiting)
        if waiting:
            self._lease.confirm()
        for row, blob in waiting:
            try:
                self._register(registry, row, blob)
            except (records.DifferentBytes, records.TooManyPinned) as error:
                self._note(error)  # would be refused again
            with self._changed:
                self._waiting = [one for one in self._waiting if one[0] is not row]

    def _register(self, registry: "Registry", row: records.NewVersion, blob: bytes) -> None:
        policy, version, found = row.policy, row.version, row.evaluation
        known = {one.version: one for one in registry.list(policy) if one.run == self._run}
        others = [one.evaluation.mean for one in known.values() if one.evaluation and one.version != version]
        is_new = version not in known
        is_best = found is not None and all(found.mean > other for other in others)
        if is_new and row.origin is records.Origin.BEST and not is_best:
            return
        if is_new:
            parents = [before for before in (self._parent, *self._own) if 0 < before < version]
            failpoint("keep.writing", version)
            weight_files.write_kept(self._run_dir, version, blob)
            failpoint("keep.registering", version)
            registry.register(replace(row, parent=max(parents, default=None)), by=BY, make_room=True)
            self._own.append(version)
            log.info("version kept", extra={"version": version, "origin": row.origin.value})
        elif found is not None and found != known[version].evaluation:
            registry.record_evaluation(policy, version, found, by=BY)
        if row.origin is not records.Origin.PERIODIC and self._activate_first:
            self._activate(registry, version, is_last=row.origin is records.Origin.FINAL)

    def _activate(self, registry: "Registry", version: int, *, is_last: bool) -> None:
        """Make the first version active, at the end the best; an operator's earlier decision stays."""
        policy = self._policy
        active = registry.active(policy)
        if active is None:
            if registry.get(policy, version).status is records.Status.CANDIDATE:
                registry.promote(policy, version, "the first version worth serving", by=BY)
        elif is_last and self._decides_alone(registry):
            top = _best(registry.pinned(policy), self._run)
            if top is not None and top.version != active.version and top.run == active.run:
                registry.promote(policy, top.version, "the best version of a run that has ended", by=BY)

    def _decides_alone(self, registry: "Registry") -> bool:
        events = registry.events(self._policy, records.MAX_EVENTS)
        return all(event.by == BY for event in events if event.action in _DECISIONS)

    # ---- Redis and the run's folder follow the registry

    def _follow(self, registry: "Registry") -> None:
        """Follow once; raises errors of registry and disk, and Fatal when this learner may not write."""
        revision = registry.traffic(self._policy).revision
        pinned = self._own_pinned(registry)
        if self._revision is None:
            self._highest = self._highest_used(registry)
        self._hold(registry, pinned, revision)
        if revision != self._revision:
            self._renumber(registry, pinned, revision)
        self._revision = revision

    def _highest_used(self, registry: "Registry") -> int:
        """Return the highest number that may not be drawn again, the one below its range for a new run.

        A registry in the folder of this run is its own until another run registers a version there.
        """
        known = registry.list(self._policy)
        own = max((one.version for one in known if one.run == self._run), default=0)
        if not self._is_shared and all(one.run == self._run for one in known):
            return own
        return max(registry.reserve(self._policy, self._run) - 1, own)

    def _own_pinned(self, registry: "Registry") -> dict[int, records.PolicyVersion]:
        """Other runs that share the registry hold their own pinned versions."""
        return {one.version: one for one in registry.pinned(self._policy) if one.run == self._run}

    def _hold(self, registry: "Registry", pinned: dict[int, records.PolicyVersion], revision: int) -> None:
        for version in self._keep(pinned.keys(), revision):
            self._restore(pinned[version])
        for version in weight_files.kept_files(self._run_dir) - pinned.keys():
            if self._is_retired(registry, version):
                weight_files.forget_kept(self._run_dir, version)
        metrics.VERSIONS_KEPT.set(len(pinned))

    def _keep(self, versions: Collection[int], revision: int) -> tuple[int, ...]:
        self._highest = max(self._highest, *versions, 0)
        return self._lease.patiently(
            lambda: self._kept.keep(versions, highest=self._highest, traffic_revision=revision)
        )

    def _is_retired(self, registry: "Registry", version: int) -> bool:
        """Whether this registry has retired it; one that it does not know may be another registry's."""
        try:
            found = registry.get(self._policy, version)
        except records.UnknownVersion:
            return False
        return found.run == self._run and not found.pinned

    def _restore(self, version: records.PolicyVersion) -> None:
        try:
            blob = weight_files.read_kept(self._run_dir, version.version, version.sha256)
        except ValueError as error:
            if version.version not in self._unreadable:
                log.error("the weights of a kept version are damaged", extra={"why": str(error)})  # noqa: TRY400 - the text says all
            self._unreadable.add(version.version)
            return
        publication = Publication(version.version, version.update, version.sha256, len(blob))
        self._lease.patiently(lambda: self._kept.restore(publication, blob))

    def _renumber(
        self, registry: "Registry", pinned: dict[int, records.PolicyVersion], revision: int
    ) -> None:
        """Give the content of a version that a rollback made active again a number of its own."""
        original = registry.awaiting_number(self._policy)
        if original is None or original.run != self._run:
            return
        blob = weight_files.read_kept(self._run_dir, original.version, original.sha256)
        version = self._lease.patiently(lambda: self._kept.draw(blob))
        weight_files.write_kept(self._run_dir, version, blob)
        self._keep({*pinned, version}, revision)
        publication = Publication(version, original.update, original.sha256, len(blob))
        self._lease.patiently(lambda: self._kept.restore(publication, blob))
        reason = f"content of version {original.version}, which a rollback made active again"
        registry.record_rollback(
            self._policy, version=version, restores=original.version, reason=reason, by=BY
        )
        log.info("rolled back", extra={"version": version, "content_of": original.version})
        self._hold(registry, self._own_pinned(registry), registry.traffic(self._policy).revision)

    def _note(self, error: Exception) -> None:
        metrics.REGISTRY_FAILURES.inc()
        if str(error) != self._failure:
            log.error("the registry of versions failed; learning goes on", extra={"error": str(error)})
        self._failure = str(error)


def _publication(of: "Candidate | FinalPolicy") -> Publication:
    return Publication(of.version, of.update, weights.sha256(of.blob), len(of.blob))


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors of a round that fails; called late, because it imports SQLAlchemy."""
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    return (records.RegistryError, SQLAlchemyError, OSError, ValueError)


def _best(pinned: Iterable[records.PolicyVersion], run: str) -> records.PolicyVersion | None:
    """Return the best of a run's versions which may serve; None where none was evaluated."""
    allowed = (records.Status.ACTIVE, records.Status.CANDIDATE)
    evaluated = [
        (one.evaluation.mean, -one.version, one)
        for one in pinned
        if one.evaluation and one.run == run and one.status in allowed
    ]
    return max(evaluated)[2] if evaluated else None
