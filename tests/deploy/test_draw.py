"""The pictures say what Grafana would say: units and legends."""

import pytest

from deploy.grafana import queries
from deploy.grafana.draw import COLOURS, formatter, legend

UNITS = sorted({panel.unit for file in queries.files() for panel in queries.panels(file)})


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("percentunit", 0.25, "25%"),
        ("percentunit", 0.0123, "1.23%"),
        ("s", 0.0005, "500 µs"),
        ("s", 0.25, "250 ms"),
        ("s", 90, "90 s"),
        ("s", 600, "10 min"),
        ("s", 36_000, "10 h"),
        ("bytes", 3 * 1024 * 1024, "3 MiB"),
        ("Bps", 512, "512B/s"),
        ("none", 12_345, "12.3 k"),
        ("suffix: steps/s", 2_500, "2.5 k"),
    ],
)
def test_a_value_has_its_unit(unit: str, value: float, text: str) -> None:
    assert formatter(unit)(value) == text


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_of_the_dashboards_can_be_written(unit: str) -> None:
    assert all(formatter(unit)(value) for value in (0.0, -1.5, 1e-9, 1e12))


def test_a_legend_names_what_tells_curves_apart() -> None:
    assert legend("{{role}} {{run}}", {"role": "actor", "run": "a"}) == "actor"
    assert legend("p99 {{run}}", {}) == "p99"


def test_every_colour_of_the_limits_can_be_drawn() -> None:
    limits = [panel.limits for file in queries.files() for panel in queries.panels(file)]
    assert {colour for steps in limits for _, colour in steps} <= set(COLOURS)
