"""The query by which actors are scaled, asked of Prometheus' own engine over a starved and a saturated learner."""

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

BUDGET: Final = 4096
RUN: Final = "penstock"
"""What the PodMonitor makes of the namespace."""


def scaled_object() -> dict[str, Any]:
    """As rendered."""
    (found,) = kinds(overlay("production"), "ScaledObject")
    return dict(found["spec"])


def trigger() -> dict[str, str]:
    """Query and threshold."""
    (found,) = scaled_object()["triggers"]
    return dict(found["metadata"])


def series(*, wait: float, compute: float, outstanding: float) -> list[dict[str, str]]:
    """Ten minutes of a learner, scraped every 5 s: seconds per second spent in a phase, steps outstanding."""

    def rising(phase: str, per_second: float) -> dict[str, str]:
        name = f'penstock_update_seconds_sum{{run="{RUN}",phase="{phase}",instance="learner"}}'
        return {"series": name, "values": f"0+{per_second * 5:g}x120"}

    def steady(name: str, instance: str, value: float) -> dict[str, str]:
        return {"series": f'{name}{{run="{RUN}",instance="{instance}"}}', "values": f"{value:g}x120"}

    return [
        rising("wait", wait),
        rising("compute", compute),
        rising("publish", 0.01),
        *(steady("penstock_outstanding_steps", one, outstanding) for one in ("learner", "broker")),
        steady("penstock_budget_steps", "broker", BUDGET),
        # Another run that the same Prometheus watches: saturated, and none of our business.
        {"series": 'penstock_update_seconds_sum{run="other",phase="compute"}', "values": "0+5x120"},
        {"series": 'penstock_outstanding_steps{run="other"}', "values": f"{10 * BUDGET}x120"},
    ]


def evaluate(folder: Path, given: list[dict[str, str]], expected: float | None) -> None:
    """The query's value over these series, None: no answer; promtool fails on any other."""
    samples = [] if expected is None else [{"labels": "{}", "value": expected}]
    case = {"expr": trigger()["query"], "eval_time": "8m", "exp_samples": samples}
    test = {"interval": "5s", "input_series": given, "promql_expr_test": [case]}
    path = folder / "case.yml"
    path.write_text(yaml.safe_dump({"tests": [test], "evaluation_interval": "5s"}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_starved_learner_gets_more_actors(tmp_path: Path) -> None:
    """It waits three quarters of its time, far above the target, and the budget has room."""
    evaluate(tmp_path, series(wait=0.75, compute=0.25, outstanding=BUDGET / 4), 0.75)
    assert float(trigger()["threshold"]) < 0.75


def test_a_saturated_learner_gives_actors_back(tmp_path: Path) -> None:
    """It hardly waits, and what is outstanding fills the budget."""
    evaluate(tmp_path, series(wait=0.0625, compute=0.9375, outstanding=BUDGET), 0.0625)
    assert 0.0625 < float(trigger()["threshold"])


def test_where_the_budget_is_full_more_actors_would_only_wait(tmp_path: Path) -> None:
    """A learner that waits although all leave is given out: the target itself is answered, nothing changes."""
    evaluate(
        tmp_path, series(wait=0.75, compute=0.25, outstanding=0.95 * BUDGET), float(trigger()["threshold"])
    )


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "absent"])
def test_without_a_learner_the_number_stays(tmp_path: Path, paused: bool) -> None:
    """No answer, which KEDA is told to take as none and not as zero."""
    given = series(wait=0.0, compute=0.0, outstanding=0.0) if paused else []
    evaluate(tmp_path, given, None)
    assert trigger()["ignoreNullValues"] == "false"


def test_actors_leave_one_by_one_and_have_time_to_flush() -> None:
    """Scaling down is slower than one actor's grace period; up it is not."""
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
    """A number in the Deployment would undo theirs at each `apply`."""
    objects = overlay("production")
    targets = {scaled_object()["scaleTargetRef"]["name"]}
    targets |= {one["spec"]["scaleTargetRef"]["name"] for one in kinds(objects, "HorizontalPodAutoscaler")}
    for one in kinds(objects, "Deployment"):
        assert ("replicas" in one["spec"]) == (one["metadata"]["name"] not in targets)
