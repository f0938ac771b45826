"""A version that is a candidate for registration, and the lineage that it belongs to."""

import math
from dataclasses import dataclass
from pathlib import Path

from penstock.config.credentials import registry_with_password
from penstock.config.settings import Settings
from penstock.learner.evaluation.evaluation import Evaluation, Result
from penstock.learner.progress import Progress, configuration_hash
from penstock.learner.publish.final_policy import FinalPolicy
from penstock.policy import weights
from penstock.protocol.messages import Publication
from penstock.registry import records
from penstock.registry.records import Origin
from penstock.registry.weight_files import registry_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The run behind the versions.

    configuration: sha256. parent: version that the process began from. shared: other runs may register
    versions of this policy in the same registry.
    """

    run: str
    policy: str
    run_dir: Path
    url: str
    configuration: str
    parent: int | None
    keep_every: int | None
    activate_first: bool
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCandidate:
    """A publication to register."""

    publication: Publication
    blob: bytes
    origin: Origin
    evaluation: records.Evaluation | None = None
    reason: str = ""


def lineage_of(settings: Settings, run_dir: Path, progress: Progress) -> Lineage:
    """Return the lineage of a process with these settings that begins at `progress`."""
    return Lineage(
        run=settings.run,
        policy=settings.serving.policy,
        run_dir=run_dir,
        url=registry_url(run_dir, registry_with_password(settings.registry)),
        configuration=configuration_hash(settings),
        parent=progress.log.version if progress.log is not None else None,
        keep_every=settings.learner.keep_every_updates,
        activate_first=settings.registry.activate_first,
        shared=bool(settings.registry.url),
    )


def best(result: Result) -> VersionCandidate:
    """Return the candidate for an evaluated version.

    Only the registry knows whether one before was better.
    """
    candidate = result.candidate
    return VersionCandidate(
        publication=_publication(candidate.version, candidate.update, candidate.blob),
        blob=candidate.blob,
        origin=Origin.BEST,
        evaluation=_recorded(result),
        reason=f"mean return {result.mean:g} over {result.episodes} episodes",
    )


def periodic(publication: Publication, blob: bytes, every: int) -> VersionCandidate:
    """Return the candidate for a version that is due after `every` updates."""
    return VersionCandidate(
        publication=publication, blob=blob, origin=Origin.PERIODIC, reason=f"every {every} updates"
    )


def last(
    final: FinalPolicy, evaluation: Evaluation, newest: Publication, why: str
) -> VersionCandidate | None:
    """Return the candidate that a process ends with; None where it was not published as it is.

    Args:
        final: the weights at the end.
        evaluation: the run's evaluations.
        newest: the newest publication.
        why: reason of the end, for the audit.
    """
    results = (evaluation.solved, evaluation.last, evaluation.best)
    # The best version may have been published again: the same bytes were evaluated under another number.
    evaluated = next((one for one in results if one and one.candidate.blob == final.blob), None)
    publication = _publication(final.version, final.update, final.blob)
    known = {one.candidate.version for one in results if one}
    if publication != newest and final.version not in known:
        return None
    return VersionCandidate(
        publication=publication,
        blob=final.blob,
        origin=Origin.FINAL,
        evaluation=_recorded(evaluated),
        reason=f"the learner ended: {why}",
    )


def _publication(version: int, update: int, blob: bytes) -> Publication:
    return Publication(version, update, weights.sha256(blob), len(blob))


def _recorded(result: Result | None) -> records.Evaluation | None:
    """Return a result as the registry records it; None where an environment's returns have no finite mean."""
    if result is None or not (math.isfinite(result.mean) and math.isfinite(result.std)):
        return None
    return records.Evaluation(mean=result.mean, std=result.std, episodes=result.episodes)
