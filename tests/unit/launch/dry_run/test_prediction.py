"""What calibrations say of a whole run: the arithmetic, by numbers that can be checked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from launch.dry_run.calibration import Calibration
from launch.dry_run.dry_run_command import ENOUGH_S, MEASURED_S, is_enough, next_steps
from launch.dry_run.limits import Limits, judge
from launch.dry_run.pace import Pace
from launch.dry_run.prediction import AOF_REWRITE_BYTES, Facts, predict
from launch.run.memory import Memory, Room
from penstock.config.estimate import MARGIN, Range, Scores

MIB = 1024 * 1024
FACTS = Facts(
    total_steps=10_000,
    checkpoint_interval_s=30.0,
    checkpoints_kept=3,
    evaluation_interval_steps=None,
    evaluates_base=False,
    keep_every_updates=None,
    longest_episode=None,
    remembered_steps=0,
    record_max_bytes=1000,
)
PACE = Pace(
    warmup_seconds=5.0,
    warmup_steps=500,
    settled_seconds=0.0,
    settled=True,
    measured_seconds=15.0,
    measured_updates=15,
    steps=2000,
    updates=20,
    seconds_per_step=Range(low=0.008, likely=0.01, high=0.012),
    evaluation_seconds=4.0,
    checkpoint_seconds=2.0,
    episode_length=50.0,
    log_bytes_per_step=10.0,
)
ROOM = Limits(memory=Room(10**12, "m"), disk=Room(10**12, "d"), device=None)


def calibration(steps: int = 2000, **more: Any) -> Calibration:
    """One of a machine where a step takes 0.01 s."""
    given: dict[str, Any] = {
        "startup_seconds": 6.0,
        "training_seconds": 24.0,
        "ending_seconds": 1.0,
        "steps": steps,
        "pace": PACE,
        "memory": {"learner": Memory(300 * MIB, 100 * MIB), "actor": Memory(200 * MIB, 100 * MIB)},
        "disk": {"logs": 1000, "checkpoints": 7000, "metrics.jsonl": 2000},
        "checkpoint_bytes": 5000,
        "version_bytes": 100,
        "returns": Scores.of([1.0]),
        "evaluation": None,
    }
    return Calibration(**given | more)


def test_time_is_the_sum_of_its_parts() -> None:
    """5 s of warm-up and 9,500 steps of 0.01 s are 100 s.

    Three checkpoints between and one at the end, one evaluation.
    """
    found = predict(FACTS, [calibration()], Range.exactly(20.0), 0, None)
    likely = {name: part.likely for name, part in found.time.items()}
    assert likely == {
        "preparation": 20.0,
        "start": 6.0,
        "learning": pytest.approx(100.0),
        "checkpoints": pytest.approx(4 * 2.0),
        "evaluations beside it": 0.0,
        "last evaluation": 4.0,
        "end": 1.0,
    }
    assert found.seconds.likely == pytest.approx(139.0)
    assert found.time["learning"].low == pytest.approx(9500 * 0.008 + 5.0 * (1 - MARGIN))
    assert found.time["learning"].high == pytest.approx(9500 * 0.012 + 5.0 * (1 + MARGIN))


def test_the_spread_of_the_pace_is_that_of_all_calibrations() -> None:
    """The last says what is likely; one whose processes were still starting says nothing."""
    slow = replace(PACE, seconds_per_step=Range(low=0.02, likely=0.03, high=0.04))
    found = predict(FACTS, [calibration(1000, pace=slow), calibration()], Range.exactly(0.0), 0, None)
    assert found.seconds_per_step == Range(low=0.008, likely=0.01, high=0.04)
    starting = calibration(1000, pace=replace(slow, settled=False))
    found = predict(FACTS, [starting, calibration()], Range.exactly(0.0), 0, None)
    assert found.seconds_per_step == PACE.seconds_per_step


def test_what_was_measured_twice_has_its_spread() -> None:
    """The last is likely: the first start reads from a cold disk."""
    found = predict(
        FACTS, [calibration(1000, startup_seconds=9.0), calibration()], Range.exactly(0.0), 0, None
    )
    start = found.time["start"]
    assert [start.low, start.likely, start.high] == pytest.approx(
        [6.0 * (1 - MARGIN), 6.0, 9.0 * (1 + MARGIN)]
    )


def test_evaluations_beside_the_training_may_cost_nothing_or_all_of_their_time() -> None:
    """Three before the last: at 2,500, 5,000 and 7,500 steps."""
    facts = replace(FACTS, evaluation_interval_steps=2500)
    beside = predict(facts, [calibration()], Range.exactly(0.0), 0, None).time["evaluations beside it"]
    assert [beside.low, beside.likely, beside.high] == pytest.approx([0.0, 6.0, 12.0 * (1 + MARGIN)])


def test_the_policy_that_training_begins_with_is_one_more_evaluation_beside_it() -> None:
    """Of the same episodes."""
    facts = replace(FACTS, evaluates_base=True)
    beside = predict(facts, [calibration()], Range.exactly(0.0), 0, None).time["evaluations beside it"]
    assert [beside.low, beside.likely, beside.high] == pytest.approx([0.0, 2.0, 4.0 * (1 + MARGIN)])


def test_an_evaluation_may_become_as_long_as_episodes_may() -> None:
    """Of 50 steps while it was measured, of 500 at most."""
    last = predict(replace(FACTS, longest_episode=500), [calibration()], Range.exactly(0.0), 0, None)
    evaluation = last.time["last evaluation"]
    assert evaluation.low == pytest.approx(4.0 * (1 - MARGIN))
    assert evaluation.high == pytest.approx(4.0 * (1 + MARGIN) * 10)
    assert evaluation.likely == pytest.approx((4.0 + evaluation.high) / 2)


def test_a_run_that_is_no_longer_than_its_calibration_takes_what_that_took() -> None:
    """There is no pace to be told apart from evaluation and checkpoint, and nothing is added twice."""
    found = predict(FACTS, [calibration(pace=None)], Range.exactly(0.0), 0, None)
    assert found.seconds.likely == pytest.approx(6.0 + 24.0 + 1.0)


def test_memory_counts_shared_pages_once_and_adds_the_log_of_two_checkpoints() -> None:
    """60 s of 100 steps a second lie in Redis, of which the calibration had 2,000 steps."""
    found = predict(FACTS, [calibration()], Range.exactly(0.0), 0, 7)
    peak = (200 + 100 + 100) * MIB
    assert found.memory.likely == peak + 10.0 * (6000 - 2000)
    assert found.memory.low == pytest.approx(peak * (1 - MARGIN))
    assert found.memory.high == pytest.approx(peak * (1 + MARGIN) + 40_000)
    assert found.roles == {"learner": 300 * MIB, "actor": 200 * MIB}
    assert found.device_memory is not None
    assert found.device_memory.likely == 7


def test_what_is_remembered_grows_to_its_capacity() -> None:
    """In the learner as the two calibrations grew, and in Redis."""
    small = calibration(1000, memory={"learner": Memory(200 * MIB, 0)})
    large = calibration(2000, memory={"learner": Memory(300 * MIB, 0)})
    facts = replace(FACTS, remembered_steps=8000)
    found = predict(facts, [small, large], Range.exactly(0.0), 0, None)
    growth = 100 * MIB / 1000 * (8000 - 2000) + 10.0 * (8000 - 2000)
    assert found.memory.likely == pytest.approx(300 * MIB + growth)


def test_disk_grows_as_it_grew_and_checkpoints_as_many_as_are_kept() -> None:
    """metrics.jsonl by a byte a step; three checkpoints and one that is being written."""
    first = calibration(1000, disk={"logs": 1000, "metrics.jsonl": 1000})
    found = predict(FACTS, [first, calibration()], Range.exactly(0.0), 500, None)
    likely = {name: part.likely for name, part in found.disk.items()}
    assert likely == {"preparation": 500, "logs": 1000, "checkpoints": 20_000, "metrics.jsonl": 10_000}
    assert found.disk_bytes.likely == 31_500


def test_the_append_only_file_is_written_anew_and_a_recording_ends() -> None:
    """Neither grows for ever."""
    first = calibration(1000, disk={"redis": 0, "record": 0})
    last = calibration(2000, disk={"redis": 40 * MIB, "record": 900})
    found = predict(FACTS, [first, last], Range.exactly(0.0), 0, None).disk
    held = 10.0 * 2000 + 2 * 100
    assert found["redis"].low == held
    assert found["redis"].high == held + AOF_REWRITE_BYTES
    assert found["record"].likely == 1000


def test_versions_that_are_kept_are_on_disk() -> None:
    """Every 50 updates one: 10,000 steps are 100 updates."""
    one = calibration(disk={"policies": 300})
    found = predict(replace(FACTS, keep_every_updates=50), [one], Range.exactly(0.0), 0, None).disk
    assert found["policies"].likely == 300 + 2 * 100


def test_what_will_not_fit_is_refused_with_figure_limit_and_remedy() -> None:
    """What only may not fit is told and not refused."""
    prediction = predict(FACTS, [calibration()], Range.exactly(0.0), 0, 8 * MIB)
    assert judge(prediction, ROOM).refused == ()
    assert judge(prediction, ROOM).doubtful == ()
    tight = Limits(
        memory=Room(100 * MIB, "the limit in /c"),
        disk=Room(10, "free in /r"),
        device=Room(MIB, "free on GPUs"),
    )
    memory, disk, device = judge(prediction, tight).refused
    assert memory.startswith(
        "memory: 400.0 MiB needed, 100.0 MiB there (the limit in /c): start fewer actors"
    )
    assert disk.startswith("disk: 0.0 MiB needed, 0.0 MiB there (free in /r): choose another file system")
    assert device.startswith("GPU memory: 8.0 MiB needed, 1.0 MiB there (free on GPUs): lower")
    doubtful = judge(prediction, replace(ROOM, memory=Room(410 * MIB, "m")))
    assert doubtful.refused == ()
    assert [text[:7] for text in doubtful.doubtful] == ["memory:"]


def test_a_calibration_is_made_longer_until_the_pace_is_known() -> None:
    """By what is known of it: 20 s at 100 steps a second behind the warm-up."""
    assert is_enough([calibration(), calibration()])
    assert not is_enough([calibration()])
    for pace in (None, replace(PACE, measured_seconds=ENOUGH_S / 2), replace(PACE, settled=False)):
        assert not is_enough([calibration(), calibration(pace=pace)])
    assert next_steps(calibration(), 2000) == 500 + round(MEASURED_S * 100)
    assert next_steps(calibration(pace=None), 2000) == 8000
    late = replace(PACE, settled=False, settled_seconds=30.0)
    assert next_steps(calibration(pace=late), 2000) == 500 + round((MEASURED_S + 30.0) * 100)


def test_slow_updates_are_made_as_often_as_a_pace_needs() -> None:
    """What a calibration was asked for and had no time to make is made by the next one, and no more."""
    assert next_steps(calibration(400, pace=None), 2000) == 2000
    assert next_steps(calibration(400), 2000) == 2000
