"""The rendered overlays, run: every container as the manifest says it, until CartPole is solved.

A node in namespaces of its own (`tests/deploy/node`) gives each pod its network, its read-only root, its
volumes, its user and its probes. Nothing is changed on the way: addresses, ports, paths and names are those
of the manifest. A Prometheus looks at it as the rendered PodMonitor and PrometheusRule say, but for SCRAPE_S.
"""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.manifests import (
    KUBERNETES,
    ROOT,
    Object,
    Workload,
    needs_kubectl,
    render,
    with_components,
    workloads,
)
from tests.deploy.node.images import NAMESPACES, absent

PATIENCE_S: Final = 240
SCRAPE_S: Final = 2
"""In place of the PodMonitor's 15 s and the operator's 30 s between evaluations: the run is short."""
LOCAL, PRODUCTION = (KUBERNETES / "overlays" / name for name in ("local", "production"))
PROBES: Final = {"startup", "readiness", "liveness"}


lacking: Final = cache(absent)


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


NAMESPACE: Final = "penstock"
OF_A_LAUNCHER: Final = {"penstock_restarts_total"}
"""Metrics of rules that are not there on Kubernetes, which starts processes itself."""
OF_A_GATEWAY: Final = "_gateway_"
"""Metrics of what the overlays that are watched do not have."""


def check_prometheus(told: Object, pods: AbstractSet[str]) -> None:
    """Every pod (those that have a port for metrics) is a target, every rule and every query works."""
    if "absent" in told:
        warnings.warn(f"Prometheus was left out: {told['absent']}", stacklevel=2)
        return
    check_targets(told, pods)
    check_rules(told)
    check_panels(told)


def check_targets(told: Object, pods: AbstractSet[str]) -> None:
    """Each is up, and has the labels that the operator, the PodMonitor and the dashboards go by."""
    targets = {one["labels"]["pod"] for one in told["targets"]}
    assert targets == pods, targets ^ pods
    for one in told["targets"]:
        assert (one["health"], one["lastError"]) == ("up", ""), one
        pod, container = one["labels"]["pod"], one["labels"]["container"]
        assert one["labels"] == {
            "job": f"{NAMESPACE}/penstock",
            "namespace": NAMESPACE,
            "pod": pod,
            "container": container,
            "endpoint": "metrics",
            "app_kubernetes_io_component": container,
            "run": NAMESPACE,
            "instance": pod,
        }, one
    twice = [label for label in told["labels"] if label.startswith("exported_")]
    assert not twice, twice


def check_rules(told: Object) -> None:
    """None errs, each has what it asks for, what is recorded has values, and no alert fires."""
    rules = [rule for group in told["groups"] for rule in group["rules"]]
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}, rules
    wrong = [rule for rule in rules if rule["health"] != "ok" or rule.get("lastError")]
    assert not wrong, wrong
    asked = {name for rule in rules for name in re.findall(r"penstock[_:]\w+", rule["query"])}
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    there = OF_A_LAUNCHER | set(told["metrics"])
    unknown = {name for name in asked | recorded if name not in there and OF_A_GATEWAY not in name}
    assert not unknown, unknown
    firing = [rule for rule in rules if rule.get("state") == "firing"]
    assert not firing, firing


def check_panels(told: Object) -> None:
    """No query errs, and the series have the labels of legends; test_watched_run.py judges their values."""
    assert told["runs"] == [NAMESPACE], told["runs"]  # what the dashboards' variable offers
    for shown in told["panels"]:
        assert shown["error"] == "", shown
        legend = set(re.findall(r"{{(\w+)}}", shown["legend"]))
        assert all(legend <= series["labels"].keys() for series in shown["series"]), shown
    assert any(any(one["values"]) for shown in told["panels"] for one in shown["series"])
