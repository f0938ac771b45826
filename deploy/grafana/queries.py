"""Every query of the dashboards, read from the JSON files, as Grafana would ask it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
ALL_RUNS: Final = ".*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One curve or set of curves. expression: as it stands in the file, with Grafana's variables."""

    expression: str
    legend: str

    def asked(self, *, run: str = ALL_RUNS, window: str) -> str:
        """Return the PromQL that Grafana sends. run: a regular expression. window: such as "1m"."""
        return self.expression.replace("$run", run).replace("$__rate_interval", window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of a dashboard. limits: (value, colour), the first value None."""

    dashboard: str
    title: str
    kind: str
    unit: str
    description: str
    limits: tuple[tuple[float | None, str], ...]
    queries: tuple[Query, ...]
    place: Mapping[str, int]
    is_stacked: bool


def files() -> list[Path]:
    """Return the dashboards' files."""
    return sorted(FOLDER.glob("*.json"))


def panels(file: Path) -> Iterator[Panel]:
    """Yield the panels of a file from top to bottom."""
    for panel in json.loads(file.read_text())["panels"]:
        if panel["type"] != "row":
            yield _panel(file.stem, panel)


def rows(file: Path) -> list[tuple[str, int]]:
    """Return the title of each row of panels, and its beginning in the grid."""
    found = [panel for panel in json.loads(file.read_text())["panels"] if panel["type"] == "row"]
    return [(row["title"], row["gridPos"].get("y", 0)) for row in found]


def _panel(dashboard: str, panel: Mapping[str, Any]) -> Panel:
    defaults = panel["fieldConfig"]["defaults"]
    stacking = defaults.get("custom", {}).get("stacking", {})
    return Panel(
        dashboard=dashboard,
        title=panel["title"],
        kind=panel["type"],
        unit=defaults.get("unit", ""),
        description=panel.get("description", ""),
        limits=tuple((step["value"], step["color"]) for step in defaults["thresholds"]["steps"]),
        queries=tuple(
            Query(expression=target["expr"], legend=target.get("legendFormat", ""))
            for target in panel["targets"]
        ),
        place=panel["gridPos"],
        is_stacked=stacking.get("mode", "none") != "none",
    )
