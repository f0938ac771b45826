"""The folder of a run that is over: with a registry of its own, in which three versions are kept."""

from pathlib import Path
from typing import Final

from penstock.config.settings import PolicySection
from penstock.learner.publish.kept_versions import write_specification
from penstock.policy import weights
from penstock.policy.policy import build
from penstock.protocol.spaces import Discrete
from penstock.registry.records import NewVersion, Origin
from penstock.registry.registry import Registry
from penstock.registry.weight_files import registry_url, write_kept
from tests.support.run.small_run import OBSERVATION, RUN, specification
from tests.support.storage.ready_tables import with_registry

VERSIONS: Final = (3, 5, 9)


def write_run(folder: Path, policy: str = "default") -> Path:
    """Make the folder: VERSIONS of a policy, of which 3 is active; returns it."""
    folder.mkdir(parents=True)
    write_specification(folder, specification())
    with Registry.open(with_registry(registry_url(folder)), migrate=True) as registry:
        for version in VERSIONS:
            blob = weights.encode(build(OBSERVATION, Discrete(2), PolicySection(), seed=version))
            write_kept(folder, version, blob)
            registry.register(
                NewVersion(
                    policy=policy,
                    version=version,
                    run=RUN,
                    update=version,
                    sha256=weights.sha256(blob),
                    size_bytes=len(blob),
                    origin=Origin.PERIODIC,
                ),
                by="learner",
            )
        registry.promote(policy, VERSIONS[0], "first", by="learner")
    return folder
