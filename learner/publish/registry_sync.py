"""Make Redis and the run's folder follow the registry.

Bytes of pinned versions are held, others are released.

    registry.pinned ──► `penstock:kept` in Redis, so that GetWeights answers for it
           │            bytes that Redis does not hold (it went back, or dropped them) come from the file
           └──────────► policies/VERSION.safetensors; those of retired versions are removed

A rollback made an older version active again at once; here its content gets a number of its own, drawn where
all numbers are drawn, so that versions only rise. The pointer that actors follow does not move: training goes
on. Each step may be repeated. A crash in between leaves bytes in Redis, which the next round releases, or a
file that no registry names: it is left in place, for it may be another registry's.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.broker.log.kept_weights import KeptWeights
from penstock.learner.lease import LeaseKeeper
from penstock.protocol.messages import Publication
from penstock.registry.records import PolicyVersion
from penstock.registry.registry_errors import UnknownVersion
from penstock.registry.weight_files import forget_kept, kept_files, read_kept, write_kept
from penstock.runtime import metrics

if TYPE_CHECKING:
    from penstock.registry.registry import Registry

BY: Final = "learner"

log = logging.getLogger(__name__)


class RegistrySync:
    """Makes Redis and the folder follow the registry.

    Call `follow` as often as wished, from one thread at a time.

    Args:
        kept: the weights of kept versions in Redis.
        lease: the lease under which it writes.
        run: name of the run.
        policy: name of the policy in the registry.
        run_dir: folder of the run.
        shared: other runs may register versions of this policy, so that numbers are reserved for this one.
    """

    def __init__(
        self,
        kept: KeptWeights,
        lease: LeaseKeeper,
        run: str,
        policy: str,
        run_dir: Path,
        *,
        shared: bool = False,
    ) -> None:
        self._kept = kept
        self._lease = lease
        self._run = run
        self._policy = policy
        self._run_dir = run_dir
        self._shared = shared
        self._highest = 0
        self._revision: int | None = None
        self._unreadable: set[int] = set()

    def confirm(self) -> None:
        """Raise Fatal when another learner has taken over.

        The registry itself does not know which learner may write.
        """
        self._lease.confirm()

    def follow(self, registry: "Registry") -> None:
        """Follow the registry once.

        Raises the errors of the registry and the disk, and Fatal when this learner may not write any more.
        """
        revision = registry.traffic(self._policy).revision
        pinned = self._own(registry)
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
        if not self._shared and all(one.run == self._run for one in known):
            return own
        return max(registry.reserve(self._policy, self._run) - 1, own)

    def _own(self, registry: "Registry") -> dict[int, PolicyVersion]:
        """Return the pinned versions of this run; other runs that share the registry hold their own."""
        return {one.version: one for one in registry.pinned(self._policy) if one.run == self._run}

    def _hold(self, registry: "Registry", pinned: dict[int, PolicyVersion], revision: int) -> None:
        for version in self._keep(pinned.keys(), revision):
            self._restore(pinned[version])
        for version in kept_files(self._run_dir) - pinned.keys():
            if self._is_retired(registry, version):
                forget_kept(self._run_dir, version)
        metrics.VERSIONS_KEPT.set(len(pinned))

    def _keep(self, versions: Collection[int], revision: int) -> tuple[int, ...]:
        self._highest = max(self._highest, *versions, 0)
        return self._lease.patiently(
            lambda: self._kept.keep(versions, highest=self._highest, traffic_revision=revision)
        )

    def _is_retired(self, registry: "Registry", version: int) -> bool:
        """Return whether this registry has retired the version.

        One that it does not know may be another registry's.
        """
        try:
            found = registry.get(self._policy, version)
        except UnknownVersion:
            return False
        return found.run == self._run and not found.pinned

    def _restore(self, version: PolicyVersion) -> None:
        try:
            blob = read_kept(self._run_dir, version.version, version.sha256)
        except ValueError as error:
            if version.version not in self._unreadable:
                log.error("a version that is kept cannot be answered for", extra={"why": str(error)})  # noqa: TRY400 - the text says all
            self._unreadable.add(version.version)
            return
        publication = Publication(version.version, version.update, version.sha256, len(blob))
        self._lease.patiently(lambda: self._kept.restore(publication, blob))

    def _renumber(self, registry: "Registry", pinned: dict[int, PolicyVersion], revision: int) -> None:
        """Give the content of a version that a rollback made active again a number of its own."""
        original = registry.awaiting_number(self._policy)
        if original is None or original.run != self._run:
            return
        blob = read_kept(self._run_dir, original.version, original.sha256)
        version = self._lease.patiently(lambda: self._kept.draw(blob))
        write_kept(self._run_dir, version, blob)
        self._keep({*pinned, version}, revision)
        publication = Publication(version, original.update, original.sha256, len(blob))
        self._lease.patiently(lambda: self._kept.restore(publication, blob))
        reason = f"content of version {original.version}, which a rollback made active again"
        registry.record_rollback(
            self._policy, version=version, restores=original.version, reason=reason, by=BY
        )
        log.info("rolled back", extra={"version": version, "content_of": original.version})
        self._hold(registry, self._own(registry), registry.traffic(self._policy).revision)
