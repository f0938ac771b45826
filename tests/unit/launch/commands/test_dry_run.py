"""The pace of a short run, extrapolated to all of the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import ConfigurationError, LearnerSection
from penstock.launch.commands.dry_run import Pace, ShortRun, check, lines, pace_of, predicted, shortened
from penstock.launch.commands.request import Request
from penstock.launch.run.plan import Plan, make_plan

PACE = Pace(seconds=20.0, steps=1000, updates=10, seconds_per_step=0.01)
SHORT = ShortRun(wall_seconds=35.0, training_seconds=21.0, is_whole=False, pace=PACE, memory={})


def row(seconds: float, steps: int, updates: int) -> dict[str, Any]:
    """A line of `metrics.jsonl` as far as the pace reads it."""
    return {"training_seconds": seconds, "env_steps": steps, "updates": updates}


def plan_in(folder: Path, *assignments: str) -> Plan:
    """For CartPole."""
    return make_plan(Request(what="CartPole-v1", run_dir=folder, seed=3, assignments=assignments))


def test_the_pace_is_that_of_the_later_half() -> None:
    rows = [row(0.0, 0, 0), row(5.0, 100, 1), row(10.0, 200, 2)]
    rows += [row(10.0 + n, 200 + 100 * n, 2 + n) for n in range(1, 7)]
    pace = pace_of([*rows, row(30.0, 900, 9)])
    assert pace is not None
    assert (pace.seconds, pace.steps, pace.updates) == (16.0, 800, 8)
    assert pace.seconds_per_step == pytest.approx(0.01)


def test_two_slow_updates_are_enough() -> None:
    rows = [row(1.0, 0, 0), row(60.0, 100, 1), row(61.0, 100, 1), row(130.0, 200, 2), row(150.0, 200, 2)]
    assert pace_of(rows) == Pace(seconds=130.0, steps=200, updates=2, seconds_per_step=0.7)


@pytest.mark.parametrize(
    "rows", [[], [row(5.0, 100, 1)], [row(1.0, 50, 0), row(5.0, 100, 1), row(9.0, 200, 2)]]
)
def test_too_few_updates_are_no_pace(rows: list[dict[str, Any]]) -> None:
    assert pace_of(rows) is None


def test_all_steps_are_predicted_by_the_pace() -> None:
    assert predicted(LearnerSection(total_steps=100_000), SHORT) == pytest.approx(15 + 20 + 990)


def test_a_limit_of_updates_or_seconds_ends_the_run_sooner() -> None:
    section = LearnerSection(total_steps=100_000)
    assert predicted(section.model_copy(update={"total_updates": 50}), SHORT) == pytest.approx(15 + 20 + 40)
    assert predicted(section.model_copy(update={"total_seconds": 60.0}), SHORT) == pytest.approx(15 + 60)


def test_a_run_that_is_as_short_is_not_extrapolated() -> None:
    for pace in (PACE, None):
        whole = replace(SHORT, is_whole=True, pace=pace)
        assert predicted(LearnerSection(total_steps=100_000), whole) == SHORT.wall_seconds


def test_minutes_and_peak_memory_are_printed_next_to_what_is_free() -> None:
    found: dict[str, Any] = {
        "environment": "E", "seed": 3, "total_steps": 9000, "seconds": 90.0, "preparation_seconds": 30.0,
        "measured": {"steps": 1000, "updates": 10, "seconds": 20.0, "seconds_per_step": 0.01},
        "memory_bytes": 2**30, "memory_bytes_by_role": {"actor": 2**20}, "device_memory_bytes": 2**21,
        "available": {"memory_bytes": 2**31, "device_memory_bytes": 2**22},
        "scores": {"feedback": {"count": 15, "mean": 0.7, "std": 0.1}},
    }  # fmt: skip
    text = "\n".join(lines(found))
    assert "time         1.5 minutes" in text
    assert "30.0 s of them are preparation" in text
    assert "1,000 steps and 10 updates in 20.0 s, then 100.0 steps a second" in text
    assert "memory       1.00 GiB at most, 2.00 GiB are free" in text
    assert "actor 1.0 MiB" in text
    assert "GPU memory   2.0 MiB at most, 4.0 MiB are free" in text
    assert "15 scores" in text
    assert "GPU" not in "\n".join(lines(found | {"device_memory_bytes": None}))


@pytest.mark.parametrize(
    ("assignments", "recording", "ui", "said"),
    [
        ((), True, False, "--dry-run --from"),
        ((), False, True, "--dry-run --ui"),
        (("serving.listen=127.0.0.1:0",), False, False, "--dry-run --serve"),
        (("broker.redis=redis://127.0.0.1:6379",), False, False, "--dry-run --redis"),
    ],
)
def test_a_run_that_cannot_be_predicted_is_refused(
    assignments: tuple[str, ...], recording: bool, ui: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(plan_in(tmp_path / "run", *assignments), recording=recording, ui=ui)


def test_a_short_run_reaches_no_other_service_and_ends_by_its_time(tmp_path: Path) -> None:
    asked = (
        "metrics.trackers=['tensorboard']",
        "evaluation.interval_steps=10",
        "evaluation.base=true",
    )
    plan = plan_in(
        tmp_path / "run", *asked, f"actor.ack_journal='{tmp_path}/journals'", "learner.record='record'"
    )
    settings = shortened(plan, tmp_path / "short", 20.0).settings
    assert (settings.learner.total_seconds, settings.learner.stop_at_target) == (20.0, False)
    assert settings.learner.total_steps == plan.settings.learner.total_steps
    assert settings.learner.record == tmp_path / "short" / "record"
    assert settings.actor.ack_journal == tmp_path / "short" / "journals"
    assert settings.metrics.trackers == ()
    assert settings.evaluation.interval_steps is None
    assert not settings.evaluation.base  # it is one more evaluation, beside the steps that are measured
    assert (settings.algorithm, settings.environment) == (plan.settings.algorithm, plan.settings.environment)
