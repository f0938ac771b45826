"""The rendered overlays, run: every container as the manifest says it, until CartPole is solved.

A node in namespaces of its own (`tests/deploy/node`) gives each pod its network, its read-only root, its volumes, its
user and its probes. Nothing is changed on the way: addresses, ports, paths and names are those of the manifest.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.manifests import ROOT, Workload, needs_kubectl, overlay, workloads
from tests.deploy.node.images import NAMESPACES, absent

PATIENCE_S: Final = 240
PROBES: Final = {"startup", "readiness", "liveness"}


@cache
def lacking() -> str:
    """Why a node cannot run here."""
    return absent()


def run(name: str, folder: Path, *, whole_drain: bool) -> dict[str, Any]:
    """The node's report."""
    if lacking():
        pytest.skip(lacking())
    drain = "whole" if whole_drain else "short"
    command = [sys.executable, "-m", "tests.deploy.node", name, str(folder), str(PATIENCE_S), drain]
    with (folder / "node.log").open("wb") as log:
        done = subprocess.run(
            [*NAMESPACES, *command], cwd=ROOT, stdout=log, stderr=log, timeout=PATIENCE_S + 180, check=False
        )
    assert done.returncode == 0, (folder / "node.log").read_text()[-4000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def check(name: str, report: dict[str, Any]) -> None:
    """Everything of the overlay ran as it should, and the run was solved."""
    words = report["words"]
    assert report["finished"], words
    assert report["learner"]["solved"], words
    assert report["learner"]["ledger"]["balanced"], report["learner"]
    assert sorted(pod["workload"] for pod in report["pods"].values()) == sorted(
        workload.name for workload in workloads(overlay(name)) for _ in range(workload.replicas)
    )
    by_name = {workload.name: workload for workload in workloads(overlay(name))}
    for pod, told in report["pods"].items():
        check_pod(by_name[told["workload"]], {one["container"]: one for one in told["stories"]}, words)
        assert report["ready"][pod] or not by_name[told["workload"]].serves, (pod, words)
    code, text = report["visits"]["actor"]
    assert (code, "may not call" in text) == (1, True), text
    if name == "local":
        code, text = report["visits"]["operator"]
        assert (code, json.loads(text)["run"]) == (0, "cartpole"), text


def check_pod(workload: Workload, stories: dict[str, Any], words: str) -> None:
    """Each of its containers was started, as often as it should; probes were answered; it drained in time."""
    for container in workload.spec.get("initContainers", ()):
        assert stories[container["name"]]["exits"] == [0], words
    (container,) = workload.spec["containers"]
    story = stories[container["name"]]
    assert story["image"] == container["image"]
    if not workload.serves:
        assert story["exits"] == [0], words
        return
    assert story["probed"].keys() == PROBES, (workload.name, story, words)
    assert story["exits"] == [], (workload.name, story, words)
    assert story["drained"] == 0, (workload.name, story, words)


@needs_kubectl
@pytest.mark.timeout(600)
def test_local_solves_cartpole(short_folder: Path) -> None:
    """Job, Redis, PostgreSQL, brokers, learner, actors, server, each in its pod."""
    check("local", run("local", short_folder, whole_drain=False))


@needs_kubectl
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_production_solves_cartpole(short_folder: Path) -> None:
    """With cert-manager's and the operator's secrets, and a database outside; deleted at once, each as it says."""
    check("production", run("production", short_folder, whole_drain=True))
