"""The dashboards: the files are what the code writes, and each panel can be read without asking anybody."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from deploy.grafana import queries
from deploy.grafana.queries import Panel
from penstock.gateway.frame import envelope
from penstock.runtime import metrics

ROOT: Final = Path(__file__).resolve().parents[2]
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


def test_the_files_are_what_the_code_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.grafana", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_there() -> None:
    boards = {file.stem: json.loads(file.read_text()) for file in FILES}
    assert set(boards) == {"training", "flow", "serving", "fleet", "people"}
    assert {name: board["uid"] for name, board in boards.items()} == {
        name: f"penstock-{name}" for name in boards
    }


@pytest.mark.parametrize("panel", PANELS, ids=name_of)
def test_a_panel_says_what_it_shows(panel: Panel) -> None:
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
def test_a_panel_asks_for_what_is_exported_or_recorded(panel: Panel) -> None:
    recorded = re.findall(r"record: (\S+)", (ROOT / "deploy/prometheus/rules.yml").read_text())
    exported = re.findall(r"^# TYPE (\S+) ", metrics.exposition("every role").decode(), re.MULTILINE)
    for query in panel.queries:
        asked = re.findall(r"([A-Za-z_:][\w:]*)\{", query.expression)
        assert asked, query
        assert query.expression.count('run=~"$run"') == len(asked), query
        families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in asked}
        assert families - set(exported) - set(recorded) - FOREIGN == set(), query


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_two_panels_lie_on_one_another(file: Path) -> None:
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


def test_grafana_is_told_where_both_are() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    assert "type: prometheus" in (folder / "datasources" / "prometheus.yml").read_text()
    assert "type: file" in (folder / "dashboards" / "penstock.yml").read_text()
