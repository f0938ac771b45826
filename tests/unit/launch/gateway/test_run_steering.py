"""Decisions about the versions of a job whose run is over, as the gateway has them carried out."""

from pathlib import Path
from typing import Any, Final

import pytest

from penstock.gateway.jobs.job_records import Action, CannotSteer, Order
from penstock.launch.gateway.local_runner import RUN_FOLDER
from penstock.launch.gateway.run_steering import PodSteering, RunSteering
from penstock.policy import weights
from penstock.registry.registry import Registry
from penstock.registry.weight_files import path_of, read_kept, registry_url
from tests.support.gateway.finished_run import write_run

JOB: Final = "j1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a job's run that is over: versions 3, 5 and 9, of which 3 was worth serving first."""
    return write_run(tmp_path / JOB / RUN_FOLDER)


def active(steering: RunSteering) -> dict[str, Any]:
    """The one version that clients get."""
    (found,) = [one for one in steering.versions(JOB)["versions"] if one["status"] == "active"]
    return dict(found)


def test_after_a_rollback_the_version_before_is_active_and_can_be_served(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    first = read_kept(run, 3, active(steering)["sha256"])
    for version in (9, 5):
        steering.promote(JOB, version, to="active", canary_share=None, reason="better", by="ada")
        assert active(steering)["version"] == version
        said = steering.roll_back(JOB, version, reason="worse", by="ada")
        found = active(steering)
        assert (said["withdrawn"]["version"], said["active"]["version"]) == (version, found["version"])
        assert (found["origin"], said["awaits_number"]) == ("rollback", False)
        assert read_kept(run, found["version"], found["sha256"]) == first


def test_a_version_is_read_as_a_file_only_as_it_was_registered(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    file = steering.weights(JOB, 5)
    with file.content as opened:
        content = opened.read()
    assert (file.name, weights.sha256(content)) == (
        "default-5.safetensors",
        steering.versions(JOB)["versions"][1]["sha256"],
    )
    with pytest.raises(CannotSteer, match="version=7"):
        steering.weights(JOB, 7)
    path_of(run, 5).write_bytes(content[:-1] + b"x")
    with pytest.raises(CannotSteer, match="damaged"):
        steering.weights(JOB, 5)


def test_a_version_with_none_before_it_stays_active_and_the_refusal_says_what_to_do(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    with pytest.raises(CannotSteer, match="promote another version instead"):
        steering.roll_back(JOB, 3, reason="worse", by="ada")
    assert active(steering)["version"] == 3


def test_a_canary_that_is_withdrawn_leaves_the_active_version(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    steering.promote(JOB, 9, to="canary", canary_share=0.1, reason="try", by="ada")
    assert steering.roll_back(JOB, None, reason="worse", by="ada")["active"]["version"] == 3
    assert active(steering)["version"] == 3


def test_a_version_is_decided_about_by_its_name(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    with Registry.open(f"sqlite:///{run / 'registry.sqlite'}") as registry:
        other = next(one.version for one in registry.list("default") if one.version != 3)
        registry.name("default", other, "v15")
    with pytest.raises(CannotSteer, match="is called 'v99'"):
        steering.promote(JOB, "v99", to="active", canary_share=None, reason="better", by="ada")
    made = steering.promote(JOB, "v15", to="active", canary_share=None, reason="better", by="ada")
    assert made["version"] == other
    named = {one["version"]: one["label"] for one in steering.versions(JOB)["versions"]}
    assert (named[3], named[other]) == (None, "v15")
    assert steering.roll_back(JOB, "v15", reason="worse", by="ada")


@pytest.mark.parametrize("action", Action)
def test_a_run_in_a_pod_takes_no_orders_and_its_versions_are_decided(
    run: Path, tmp_path: Path, action: Action
) -> None:
    steering = PodSteering(lambda job: tmp_path / job / RUN_FOLDER, registry_url(run))
    with pytest.raises(CannotSteer, match=f"{action}: the run of this job is in a pod"):
        steering.order(JOB, Order(action=action))
    assert [one["version"] for one in steering.versions(JOB)["versions"]] == [3, 5, 9]
