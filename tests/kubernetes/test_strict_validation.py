"""Every overlay as an API server reads it: its own schemas and admission, and no unknown field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.deploy.manifests import KUBERNETES, Object, kinds, render
from tests.kubernetes.cluster import Cluster, KubectlError
from tests.kubernetes.installation import Installation
from tests.kubernetes.node_root import source_archive

OVERLAYS: Final = ("local", "gpu", "plain", "gateway")
OPERATORS: Final = ("cert-manager.io", "keda.sh", "monitoring.coreos.com")


@pytest.fixture(params=OVERLAYS)
def installation(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    made = Installation(cluster, tmp_path / "overlay", request.param)
    yield from with_namespace(made)


def with_namespace(made: Installation) -> Iterator[Installation]:
    (namespace,) = kinds(render(made.folder), "Namespace")
    made.cluster.kubectl("apply", "--filename=-", given=yaml.safe_dump(namespace))
    try:
        yield made
    finally:
        made.remove()


def test_every_object_is_accepted(installation: Installation) -> None:
    words = ["apply", "--validate=strict", "--dry-run=server", f"--kustomize={installation.folder}"]
    said = installation.kubectl(*words).splitlines()
    assert len(said) == len(render(installation.folder)), said
    assert all(line.endswith("(server dry run)") for line in said), said


def test_production_is_accepted_where_its_operators_are(cluster: Cluster, tmp_path: Path) -> None:
    there = cluster.kubectl("api-resources", "--output=name")
    added: list[Path] = []
    if not all(name in there for name in OPERATORS):
        source = source_archive()
        added = sorted(source.parent.glob("crds/*.yaml")) if source else []
        if not added:
            pytest.skip(f"no definitions of {', '.join(OPERATORS)} on the cluster")
        for file in added:
            cluster.kubectl("apply", "--server-side", f"--filename={file}")
            cluster.kubectl("wait", "--for=condition=Established", f"--filename={file}", "--timeout=60s")
    try:
        for made in with_namespace(Installation(cluster, tmp_path / "overlay", "production")):
            test_every_object_is_accepted(made)
    finally:
        for file in added:
            cluster.kubectl("delete", f"--filename={file}")


def test_a_mistake_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    for made in with_namespace(Installation(cluster, tmp_path / "overlay", "local")):
        (budget,) = kinds(render(made.folder), "PodDisruptionBudget")
        budget = {**budget, "spec": {**budget["spec"], "maxUnavailible": 1}}
        with pytest.raises(KubectlError, match="maxUnavailible"):
            apply(made, budget)
        with pytest.raises(KubectlError, match="violates PodSecurity"):
            apply(made, privileged())


def apply(made: Installation, one: Object) -> None:
    """A dry run of one object."""
    words = ["apply", "--validate=strict", "--dry-run=server", "--filename=-"]
    made.kubectl(*words, given=yaml.safe_dump(one))


def privileged() -> Object:
    container = {"name": "root", "image": "base:1", "securityContext": {"privileged": True}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "root"},
        "spec": {"containers": [container]},
    }


def test_every_overlay_is_validated() -> None:
    there = {path.parent.name for path in (KUBERNETES / "overlays").glob("*/kustomization.yaml")}
    assert there == {*OVERLAYS, "production"}
