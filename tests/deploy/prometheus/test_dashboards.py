"""The dashboards: the files are what the code writes, and each panel can be read without asking anybody."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from deploy.grafana import queries
from deploy.grafana.draw import COLOURS, formatter, legend
from deploy.grafana.queries import Panel
from penstock.gateway.frame import envelope
from penstock.runtime import metrics
from tests.deploy.manifests import ROOT

FILES: Final = queries.files()
PANELS: Final = [panel for file in FILES for panel in queries.panels(file)]
FOREIGN: Final = {
    "up",  # Prometheus itself
    "ALERTS",
    "penstock_certificate_expiry_timestamp_seconds",  # of processes with TLS
}
WIDTH: Final = 24
DECLARED_ELSEWHERE: Final = (envelope,)
"""Declares metrics by being imported."""


def name_of(panel: Panel) -> str:
    return f"{panel.dashboard}-{panel.title}"


def test_the_files_equal_what_the_code_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.grafana", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("panel", PANELS, ids=name_of)
def test_a_panel_has_a_description(panel: Panel) -> None:
    assert panel.title
    assert len(panel.description) > 15
    assert panel.description.endswith(".")
    assert panel.unit
    assert panel.queries
    assert all(query.legend for query in panel.queries)
    (first, *others) = panel.limits
    assert first[0] is None
    assert others
    assert [value for value, _ in others] == sorted(value for value, _ in others if value is not None)


@pytest.mark.parametrize("panel", PANELS, ids=name_of)
def test_a_panel_queries_only_exported_or_recorded_series(panel: Panel) -> None:
    recorded = re.findall(r"record: (\S+)", (ROOT / "deploy/prometheus/rules.yml").read_text())
    exported = re.findall(r"^# TYPE (\S+) ", metrics.exposition("every role").decode(), re.MULTILINE)
    for query in panel.queries:
        asked = re.findall(r"([A-Za-z_:][\w:]*)\{", query.expression)
        assert asked, query
        assert query.expression.count('run=~"$run"') == len(asked), query
        families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in asked}
        assert families - set(exported) - set(recorded) - FOREIGN == set(), query


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_two_panels_overlap(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in queries.panels(file):
        place = panel.place
        cells = {
            (place.get("x", 0) + x, place.get("y", 0) + y)
            for x in range(place["w"])
            for y in range(place["h"])
        }
        assert not cells & taken, panel.title
        assert all(x < WIDTH for x, _ in cells), panel.title
        taken |= cells


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


def test_a_legend_names_what_distinguishes_curves() -> None:
    assert legend("{{role}} {{run}}", {"role": "actor", "run": "a"}) == "actor"
    assert legend("p99 {{run}}", {}) == "p99"


def test_every_colour_of_the_limits_can_be_drawn() -> None:
    limits = [panel.limits for file in queries.files() for panel in queries.panels(file)]
    assert {colour for steps in limits for _, colour in steps} <= set(COLOURS)
