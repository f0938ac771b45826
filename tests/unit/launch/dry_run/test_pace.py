"""The pace of a run, from lines that are made to have a known one."""

from typing import Any

import pytest

from launch.dry_run.pace import BLOCKS, TooShort, pace_of
from penstock.config.estimate import MARGIN

START = 1000.0


def row(seconds: float, steps: int, updates: int, **more: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl` as far as the pace reads it."""
    return {
        "time": START + seconds,
        "training_seconds": seconds,
        "env_steps": steps,
        "updates": updates,
        "checkpoint_seconds": 0.0,
        "episode_length": 20.0,
        "log_bytes": 50 * steps,
        **more,
    }


def steady(*, ending: float = 0.0) -> list[dict[str, Any]]:
    """Two slow updates of 5 s each, then twelve of 1 s, each of 100 steps.

    The last line is written at the end.
    """
    rows = [row(0.0, 0, 0), row(5.0, 100, 1), row(10.0, 200, 2)]
    rows += [row(10.0 + n, 200 + 100 * n, 2 + n) for n in range(1, 12)]
    return [*rows, row(22.0 + ending, 1400, 14)]


def test_the_pace_is_that_behind_the_warm_up() -> None:
    """A slow beginning is told apart and enters no rate."""
    pace = pace_of(steady(), START)
    assert (pace.warmup_seconds, pace.warmup_steps) == (10.0, 200)
    assert pace.seconds_per_step.likely == pytest.approx(0.01)
    assert pace.seconds_per_step.low == pytest.approx(0.01 * (1 - MARGIN))
    assert pace.seconds_per_step.high == pytest.approx(0.01 * (1 + MARGIN))
    assert (pace.measured_seconds, pace.measured_updates) == (11.0, 11)
    assert (pace.steps, pace.updates, pace.steps_per_update) == (1400, 14, 100)
    assert pace.log_bytes_per_step == 50
    assert pace.settled


def test_what_a_time_holds_is_the_warm_up_and_the_pace_behind_it() -> None:
    """At least the warm-up, which is over before any time ends a run."""
    pace = pace_of(steady(), START)
    assert [pace.steps_in(seconds) for seconds in (1.0, 10.0, 15.0)] == [200, 200, 700]


def test_experience_that_is_under_way_before_the_first_step_is_no_size_of_a_step() -> None:
    """64 KiB in the log at step 0 say nothing; all of it over all steps does."""
    rows = steady()
    rows[0]["log_bytes"] = 65_536
    assert pace_of(rows, START).log_bytes_per_step == 70_000 / 1400


def test_what_lies_behind_the_last_update_is_evaluation_but_for_the_checkpoint() -> None:
    """The last line is written when both are over."""
    rows = steady(ending=7.0)
    rows[-1]["checkpoint_seconds"] = 3.0
    pace = pace_of(rows, START)
    assert pace.evaluation_seconds == pytest.approx(4.0)
    assert pace.checkpoint_seconds == 3.0
    assert pace.seconds_per_step.likely == pytest.approx(0.01)


def test_a_checkpoint_among_the_updates_is_no_part_of_their_pace() -> None:
    """Its time is told by its line."""
    rows = steady()
    late = [{**one, "training_seconds": one["training_seconds"] + 6.0} for one in rows[8:]]
    late[0]["checkpoint_seconds"] = 6.0
    assert pace_of([*rows[:8], *late], START).seconds_per_step.likely == pytest.approx(0.01)


def test_the_spread_is_that_of_the_blocks() -> None:
    """The second half of the steps takes twice as long: the range holds both, likely is their mean."""
    slow = [row(10.0 + 2 * n, 200 + 100 * n, 2 + n) for n in range(7, 13)]
    rows = [
        *steady()[:9],
        *[{**one, "training_seconds": one["training_seconds"] - 6.0} for one in slow],
        row(22.0, 1500, 15),
    ]
    pace = pace_of(rows, START)
    assert pace.seconds_per_step.low == pytest.approx(0.01 * (1 - MARGIN))
    assert pace.seconds_per_step.high == pytest.approx(0.02 * (1 + MARGIN))
    assert pace.seconds_per_step.likely == pytest.approx(18 / 1200)
    assert BLOCKS >= 2


def test_processes_that_start_late_are_part_of_the_warm_up() -> None:
    """While the last one was starting it took its share of the processors."""
    pace = pace_of(steady(), START + 15.5)
    assert (pace.warmup_seconds, pace.warmup_steps, pace.settled) == (16.0, 800, True)
    rough = pace_of(steady(), START + 100.0)
    assert (rough.warmup_steps, rough.settled, rough.settled_seconds) == (200, False, 100.0)


@pytest.mark.parametrize("rows", [[], steady()[:1], steady()[:4]])
def test_too_few_lines_are_no_pace(rows: list[dict[str, Any]]) -> None:
    """Rather than a guess."""
    with pytest.raises(TooShort):
        pace_of(rows, START)
