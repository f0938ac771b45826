"""The curve as text: every line fits, the labels are those of the curve, the dots lie where the values do."""

from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.launch.commands.plot import drawn, graph
from penstock.launch.inspection.curve import Point


def points(*values: float | None) -> list[Point]:
    """A point every 1,000 steps."""
    return [
        Point(
            env_steps=1000 * number, seconds=0.0, updates=number, version=1, mean_return=value, staleness=None
        )
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize("columns", [24, 80, 200])
def test_a_line_that_rises_goes_from_corner_to_corner(columns: int) -> None:
    text = drawn(points(*range(11)), columns, 8).splitlines()
    assert max(map(len, text[:-1])) <= columns
    assert len(text) == 8 + 2
    assert text[0].startswith("      10.0┤")
    assert text[7].startswith("     0.000┤")
    columns_of = [line.partition("┤")[2] for line in text[:8]]
    assert columns_of[0][-1] != "\u2800", "the last value is at the top"
    assert columns_of[7][0] not in ("", "\u2800"), "the first at the bottom"
    assert len(columns_of[0]) == max(map(len, columns_of))
    assert "10,000 steps" in text[8]
    assert text[9] == "mean return 10.0 of the last 100 training episodes, after 10,000 steps"


def test_what_is_not_known_is_left_out() -> None:
    assert drawn(points(None, None), 80, 8) == "nothing learned yet"
    assert drawn([], 80, 8) == "nothing learned yet"
    assert "mean return 5.000" in drawn(points(None, 5.0), 80, 8)
    assert drawn(points(2.0, 2.0, 2.0), 40, 4).splitlines()[0].count("\u2809") > 20


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="so no run"):
        graph(tmp_path, once=True, interval=1.0)
