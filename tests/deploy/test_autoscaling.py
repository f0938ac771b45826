"""Prometheus' own engine answers the query by which actors are scaled.

The series are those of a starved and of a saturated learner.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.manifests import kinds, needs_kubectl, overlay, workloads

pytestmark = [
    needs_kubectl,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH (Debian: prometheus)"),
]

RULES: Final = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"
RUN: Final = "penstock"
"""What the PodMonitor makes of the namespace."""


def scaled_object() -> dict[str, Any]:
    (found,) = kinds(overlay("production"), "ScaledObject")
    return dict(found["spec"])


def trigger() -> dict[str, str]:
    (found,) = scaled_object()["triggers"]
    return dict(found["metadata"])


def series(actors: int, *, actor_waits: float, learner_waits: float | None) -> list[dict[str, str]]:
    """Five minutes, scraped every 15 s.

    Shares of their time in which actors wait for credit, the learner for a batch.
    """

    def rising(name: str, per_second: float, **labels: str) -> dict[str, str]:
        said = ",".join(f'{label}="{value}"' for label, value in labels.items())
        return {"series": f"{name}{{{said}}}", "values": f"0+{per_second * 15:g}x20"}

    found = [
        # Another run that the same Prometheus watches: starved, and none of our business.
        rising("penstock_learner_wait_seconds_total", 1.0, run="other"),
        rising("penstock_cpu_seconds_total", 1.0, run="other", role="actor", instance="x"),
    ]
    for number in range(actors):
        own = {"run": RUN, "instance": f"actor-{number}"}
        found.append(rising("penstock_cpu_seconds_total", 1.0, role="actor", **own))
        found.append(rising("penstock_actor_wait_seconds_total", actor_waits, cause="leave", **own))
    if learner_waits is not None:
        found.append(rising("penstock_learner_wait_seconds_total", learner_waits, run=RUN))
    return found


def evaluate(folder: Path, given: list[dict[str, str]], expected: float | None) -> None:
    """The query's value over these series, None: no answer; promtool fails on any other."""
    query = trigger()["query"]
    samples = [] if expected is None else [{"labels": query.replace("'", '"'), "value": expected}]
    case = {"expr": query, "eval_time": "5m", "exp_samples": samples}
    test = {"interval": "15s", "input_series": given, "promql_expr_test": [case]}
    path = folder / "case.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "tests": [test], "evaluation_interval": "15s"})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promise("starved-learner-gets-actors")
def test_a_starved_learner_gets_more_actors(tmp_path: Path) -> None:
    evaluate(tmp_path, series(2, actor_waits=0.0, learner_waits=0.75), 8.0)


@pytest.mark.promise("starved-learner-gets-actors")
def test_a_saturated_learner_gives_actors_back(tmp_path: Path) -> None:
    evaluate(tmp_path, series(8, actor_waits=0.75, learner_waits=0.0), 2.0)


def test_where_both_wait_in_turns_more_actors_would_only_wait(tmp_path: Path) -> None:
    evaluate(tmp_path, series(4, actor_waits=0.5, learner_waits=0.5), 4.0)


def test_without_a_learner_the_number_stays(tmp_path: Path) -> None:
    evaluate(tmp_path, series(2, actor_waits=1.0, learner_waits=None), None)
    assert trigger()["ignoreNullValues"] == "false"
    (found,) = scaled_object()["triggers"]
    assert (found["metricType"], trigger()["threshold"]) == ("AverageValue", "1")


def test_actors_leave_one_by_one_and_have_time_to_flush() -> None:
    rules = scaled_object()["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (down,) = rules["scaleDown"]["policies"]
    (actor,) = [
        w for w in workloads(overlay("production")) if w.name == scaled_object()["scaleTargetRef"]["name"]
    ]
    assert down["type"] == "Pods"
    assert down["value"] == 1
    assert down["periodSeconds"] > actor.spec["terminationGracePeriodSeconds"]
    assert rules["scaleDown"]["stabilizationWindowSeconds"] > rules["scaleUp"]["stabilizationWindowSeconds"]


def test_scalers_own_the_numbers_that_they_set() -> None:
    objects = overlay("production")
    targets = {scaled_object()["scaleTargetRef"]["name"]}
    targets |= {one["spec"]["scaleTargetRef"]["name"] for one in kinds(objects, "HorizontalPodAutoscaler")}
    for one in kinds(objects, "Deployment"):
        assert ("replicas" in one["spec"]) == (one["metadata"]["name"] not in targets)
