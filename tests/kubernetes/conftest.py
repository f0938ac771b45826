"""One cluster for all of these tests: the one that KUBECONFIG names, or one of their own."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.node_images import node_images
from tests.kubernetes.node_root import SOURCE_VARIABLE, node_root, source_archive
from tests.kubernetes.own_cluster import TAGS, OwnCluster

IMAGES_VARIABLE = "PENSTOCK_KUBERNETES_IMAGES"
"""What stands before the names of the images on a cluster of somebody's: `registry.example/` or nothing."""
TAGS_VARIABLE = "PENSTOCK_KUBERNETES_TAGS"
"""Two tags of them, OLD,NEW: an upgrade goes from one to the other."""


def lacking() -> str:
    """Why there is no cluster of the tests' own here; "" when there is."""
    if shutil.which("kubectl") is None:
        return "no kubectl on PATH (Debian: kubernetes-client)"
    source = source_archive()
    if source is None:
        return f"no KUBECONFIG, and no {SOURCE_VARIABLE} to build a cluster from"
    if not source.is_file():
        return f"{SOURCE_VARIABLE}={source} is not there"
    if os.geteuid() != 0:
        return "a cluster of one's own needs root"
    for program, package in {
        "mmdebstrap": "mmdebstrap",
        "setpriv": "util-linux",
        "openssl": "openssl",
    }.items():
        if shutil.which(program) is None:
            return f"no {program} on PATH (Debian: {package})"
    if not Path("/sys/fs/cgroup/cpu").exists():
        return "a cluster of one's own needs control groups of version 1"
    return ""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    given = os.environ.get("KUBECONFIG")
    if given:
        old, _, new = os.environ.get(TAGS_VARIABLE, "0.1.0,0.1.0").partition(",")
        yield Cluster(kubeconfig=Path(given), images=os.environ.get(IMAGES_VARIABLE, ""), tags=(old, new))
        return
    if lacking():
        pytest.skip(lacking())
    source = source_archive()
    assert source is not None
    own = OwnCluster(node_root(source), node_images(TAGS), tmp_path_factory.mktemp("cluster"))
    try:
        own.wait()
        yield own.cluster
    finally:
        own.close()
