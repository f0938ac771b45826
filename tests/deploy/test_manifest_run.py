"""The rendered overlays, run: every container as the manifest says it, until CartPole is solved.

A node in namespaces of its own (`tests/deploy/node`) gives each pod its network, its read-only root, its
volumes, its user and its probes. Nothing is changed on the way: addresses, ports, paths and names are those
of the manifest. A Prometheus looks at it as the rendered PodMonitor and PrometheusRule say, but for SCRAPE_S.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.manifests import (
    KUBERNETES,
    ROOT,
    Workload,
    needs_kubectl,
    render,
    with_components,
    workloads,
)
from tests.deploy.node.images import NAMESPACES, absent
from tests.deploy.seen_by_prometheus import check_prometheus

PATIENCE_S: Final = 240
SCRAPE_S: Final = 2
"""In place of the PodMonitor's 15 s and the operator's 30 s between evaluations: the run is short."""
LOCAL, PRODUCTION = (KUBERNETES / "overlays" / name for name in ("local", "production"))
PROBES: Final = {"startup", "readiness", "liveness"}


@cache
def lacking() -> str:
    """Why a node cannot run here."""
    return absent()


def run(overlay: Path, folder: Path, *, whole_drain: bool) -> dict[str, Any]:
    """The node's report."""
    if lacking():
        pytest.skip(lacking())
    words = [str(overlay), str(folder), str(PATIENCE_S), "whole" if whole_drain else "short", str(SCRAPE_S)]
    command = [sys.executable, "-m", "tests.deploy.node", *words]
    with (folder / "node.log").open("wb") as log:
        done = subprocess.run(
            [*NAMESPACES, *command], cwd=ROOT, stdout=log, stderr=log, timeout=PATIENCE_S + 180, check=False
        )
    assert done.returncode == 0, (folder / "node.log").read_text()[-4000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def check(overlay: Path, report: dict[str, Any]) -> None:
    there = workloads(render(overlay))
    words = report["words"]
    assert report["finished"], words
    assert report["learner"]["solved"], words
    assert report["learner"]["ledger"]["balanced"], report["learner"]
    assert sorted(pod["workload"] for pod in report["pods"].values()) == sorted(
        workload.name for workload in there for _ in range(workload.replicas)
    )
    by_name = {workload.name: workload for workload in there}
    for pod, told in report["pods"].items():
        check_pod(by_name[told["workload"]], {one["container"]: one for one in told["stories"]}, words)
        assert report["ready"][pod] or not by_name[told["workload"]].serves, (pod, words)
    assert {"learner-0", "server-5d8f9c7b4-x7k20"} <= report["metrics"].keys()
    assert all("penstock_cpu_seconds_total{" in text for text in report["metrics"].values())
    code, text = report["visits"]["actor"]
    assert (code, "may not call" in text) == (1, True), text
    if "operator" in by_name:
        code, text = report["visits"]["operator"]
        assert (code, json.loads(text)["run"]) == (0, "cartpole"), text
    check_prometheus(report["prometheus"], report["metrics"].keys())


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
    # torchrun ends with 1 when it is told to end, whatever its ranks did.
    assert story["drained"] == (container.get("command") == ["torchrun"]), (workload.name, story, words)


@pytest.mark.promise("manifests-run-rendered-pod")
@needs_kubectl
@pytest.mark.timeout(600)
def test_local_solves_cartpole(short_folder: Path, tmp_path: Path) -> None:
    watched = with_components(tmp_path / "watched", "monitoring")
    assert [one for one in render(LOCAL) if one not in render(watched)] == []
    check(watched, run(watched, short_folder, whole_drain=False))


@pytest.mark.promise("manifests-run-rendered-pod")
@needs_kubectl
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_production_solves_cartpole(short_folder: Path) -> None:
    report = run(PRODUCTION, short_folder, whole_drain=True)
    check(PRODUCTION, report)
    if "absent" not in report["prometheus"]:
        (wanted,) = report["prometheus"]["scalers"]["actor"]
        assert float(wanted["value"][1]) > 0


@needs_kubectl
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_of_two_pods_solves_cartpole(short_folder: Path, tmp_path: Path) -> None:
    ranks = with_components(tmp_path / "ranks", "monitoring", "ranks")
    report = run(ranks, short_folder, whole_drain=False)
    check(ranks, report)
    for rank in (0, 1):
        shown = report["metrics"][f"learner-{rank}"].splitlines()
        assert {"penstock_ranks 2.0", f"penstock_rank {rank}.0"} <= set(shown)
    (updates,) = [line.split()[1] for line in shown if line.startswith("penstock_rank_updates_total")]
    assert float(updates) > 0
    assert list((short_folder / "volumes" / "claim-learner-1-data").iterdir()) == []
