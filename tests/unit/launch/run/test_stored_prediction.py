"""A prediction waits for its run, and is compared with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.dry_run.calibration import shortened
from launch.dry_run.dry_run_command import check
from launch.run import stored_prediction as stored
from launch.run.plan import Plan, make_plan
from launch.run.request import Request
from launch.run.summary import concluded, summary_lines
from penstock.config.settings import ConfigurationError

PREDICTED: dict[str, Any] = {
    "total_steps": 1000,
    "seconds": {"low": 80.0, "likely": 100.0, "high": 130.0},
    "seconds_by_part": {"learning": {"low": 85.0, "likely": 105.0, "high": 125.0}},
    "seconds_per_step": {"low": 0.08, "likely": 0.1, "high": 0.12},
    "memory_bytes": {"low": 90.0, "likely": 100.0, "high": 110.0},
    "device_memory_bytes": None,
    "disk_bytes": {"low": 1.0, "likely": 2.0, "high": 3.0},
}
CAME: dict[str, Any] = {
    "ending": "steps",
    "env_steps": 1000,
    "env_steps_per_second": 8.0,
    "wall_seconds": 125.0,
    "peak_memory_bytes": 200,
    "device_memory_bytes": None,
    "disk_bytes": 4,
}


def plan_in(folder: Path, *assignments: str) -> Plan:
    """For CartPole."""
    return make_plan(Request(what="CartPole-v1", run_dir=folder, seed=3, assignments=assignments))


def test_a_run_finds_the_prediction_of_its_folder_and_of_its_configuration(tmp_path: Path) -> None:
    """Both made without knowing the run's name.

    It then lies in the run's folder, which is not taken by it.
    """
    for named, folder in ((True, "a"), (False, "b")):
        plan = plan_in(tmp_path / folder)
        file = stored.place_of(plan, named=named)
        stored.write(file, PREDICTED | {"configuration": stored.fingerprint(plan.settings)})
        again = plan_in(tmp_path / folder)
        assert again.settings.run != plan.settings.run
        found = stored.find(again)
        assert found is not None
        assert json.loads((again.run_dir / stored.FILE).read_text()) == found
    assert stored.place_of(plan, named=False).parent == tmp_path / "dry-runs"


def test_a_prediction_of_another_configuration_is_not_this_ones(tmp_path: Path) -> None:
    """Nor is there one where none was made."""
    plan = plan_in(tmp_path / "run")
    assert stored.find(plan) is None
    stored.write(
        stored.place_of(plan, named=True),
        {"configuration": stored.fingerprint(plan.settings)},
    )
    assert stored.find(plan_in(tmp_path / "run", "environment.count=3")) is None
    assert stored.find(plan_in(tmp_path / "run", "metrics.port=1")) is not None


def test_a_file_that_is_no_prediction_is_named(tmp_path: Path) -> None:
    """Before anything is started."""
    plan = plan_in(tmp_path / "run")
    plan.run_dir.mkdir()
    (plan.run_dir / stored.FILE).write_text("{")
    with pytest.raises(ConfigurationError, match=r"dry-run\.json: is no prediction .* remove it"):
        stored.find(plan)


def test_a_run_of_all_its_steps_is_compared_as_a_whole() -> None:
    """The error is of what came: 100 s were said and 125 s it took."""
    found = stored.compare(PREDICTED, CAME)
    assert found["time"] == {
        "predicted": PREDICTED["seconds"],
        "actual": 125.0,
        "error": -0.2,
        "within": True,
    }
    assert (found["memory"]["error"], found["memory"]["within"]) == (-0.5, False)
    assert found["disk"]["within"] is False
    assert found["device_memory"] is None
    assert found["seconds_per_step"] is None
    assert found["note"] == ""


def test_a_run_that_ended_early_is_compared_by_step() -> None:
    """Its time and its folder were not those of all steps; memory is."""
    found = stored.compare(PREDICTED, CAME | {"ending": "target", "env_steps": 400})
    assert found["time"] is None
    assert found["disk"] is None
    assert found["memory"]["actual"] == 200
    per_step = found["seconds_per_step"]
    # 105 s of learning, less those of the 600 steps that were not done.
    assert per_step["predicted"] == pytest.approx({"low": 37 / 400, "likely": 45 / 400, "high": 53 / 400})
    assert (per_step["actual"], per_step["error"], per_step["within"]) == (0.125, -0.1, True)
    assert found["note"] == "it ended early (target), after 400 of 1,000 steps: time is compared by step"


def test_people_read_what_was_predicted_beside_what_came(tmp_path: Path) -> None:
    """In the summary, and nothing of it without a dry run."""
    summary = {
        **CAME,
        **dict.fromkeys(("evaluation", "ledger", "restored_from", "training_seconds", "updates")),
        **dict.fromkeys(("policy_version", "mean_return", "staleness", "recording")),
        "environment": "E",
        "run": "r",
        "seed": 0,
        "solved": False,
        "interrupted": False,
        "processes": [],
        "redis": {"version": "7", "durability": "memory"},
    }
    (tmp_path / "file").write_bytes(bytes(4))
    text = "\n".join(summary_lines(concluded(tmp_path, summary, PREDICTED)))
    assert "predicted    time 100.0 s (80.0 s – 130.0 s), came to 125.0 s: -20%" in text.replace(
        "2 min 10 s", "130.0 s"
    ).replace("2 min 5 s", "125.0 s")
    assert "predicted    memory 0.0 MiB (0.0 MiB – 0.0 MiB), came to 0.0 MiB: -50%, outside the range" in text
    assert concluded(tmp_path, summary, None)["dry_run"] is None
    assert "predicted" not in "\n".join(summary_lines(concluded(tmp_path, summary, None)))


@pytest.mark.parametrize(
    ("assignments", "recording", "ui", "said"),
    [
        ((), True, False, "--dry-run --from"),
        ((), False, True, "--dry-run --ui"),
        (("serving.listen=127.0.0.1:0",), False, False, "--dry-run --serve"),
        (("broker.redis=redis://127.0.0.1:6379",), False, False, "--dry-run --redis"),
    ],
)
def test_what_a_dry_run_cannot_tell_anything_of_is_refused(
    assignments: tuple[str, ...], recording: bool, ui: bool, said: str, tmp_path: Path
) -> None:
    """Before anything is started, with what to leave out."""
    with pytest.raises(ConfigurationError, match=said):
        check(plan_in(tmp_path / "run", *assignments), recording=recording, ui=ui)


def test_a_calibration_reaches_no_other_service_and_ends_by_its_steps(tmp_path: Path) -> None:
    """Everything else is as in the run."""
    asked = (
        "metrics.trackers=['tensorboard']",
        "evaluation.interval_steps=10",
        "evaluation.base=true",
    )
    plan = plan_in(
        tmp_path / "run", *asked, f"actor.ack_journal='{tmp_path}/journals'", "learner.record='record'"
    )
    settings = shortened(plan, tmp_path / "short", 77).settings
    assert (settings.learner.total_steps, settings.learner.stop_at_target) == (77, False)
    assert settings.learner.record == tmp_path / "short" / "record"
    assert settings.actor.ack_journal == tmp_path / "short" / "journals"
    assert settings.metrics.trackers == ()
    assert settings.evaluation.interval_steps is None
    assert not settings.evaluation.base  # it is one more evaluation, beside the steps that are measured
    assert (settings.algorithm, settings.environment) == (plan.settings.algorithm, plan.settings.environment)
