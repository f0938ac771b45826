"""Every panel and every alert gets an answer from a real Prometheus that watches a real run."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from deploy.grafana import queries
from deploy.grafana.draw import View, draw
from deploy.grafana.queries import Panel, Query
from tests.deploy.prometheus.prometheus_server import RULES, WatchingPrometheus, needs_prometheus, watching
from tests.deploy.prometheus.watched_run import NOTHING_WRONG, OF_TEXT, WatchedRun, nowhere, running

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW: Final = "10s"
STEP_S: Final = 1.0
PATIENCE_S: Final = 180.0
OF_A_GATEWAY: Final = "people"
"""The board of what no run has; see test_alerts_fire_people.py."""
PANELS: Final = [
    panel for file in queries.files() if file.stem != OF_A_GATEWAY for panel in queries.panels(file)
]
QUERIES: Final = [(panel, query) for panel in PANELS for query in panel.queries]
ALERTS: Final = re.findall(
    r"- alert: (\w+)\n +expr: (\|\n(?: {10,}.*\n)+|.*\n)", (RULES / "alerts.yml").read_text()
)

NO_SERIES: Final = {
    ("fleet", "Certificates", "{{instance}} {{run}}"): "this run has no TLS; see test_alerts_fire.py",
    **OF_TEXT,
}


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A run under Prometheus's eyes, from `began_s` (Unix time) on."""

    run: WatchedRun
    prometheus: WatchingPrometheus
    began_s: float

    def values(self, query: Query) -> list[float]:
        asked = query.asked(window=WINDOW)
        found = self.prometheus.query_range(asked, self.began_s, time.time(), STEP_S)
        return [float(text) for series in found for _, text in series["values"] if text != "NaN"]

    def is_shown(self, panel: Panel, query: Query) -> bool:
        values, key = self.values(query), (panel.dashboard, panel.title, query.legend)
        return (bool(values) and (any(values) or key in NOTHING_WRONG)) or key in NO_SERIES


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run with clients, an active version, a canary and a shadow.

    Its broker and an actor were killed once.
    """
    folder = tmp_path_factory.mktemp("watched")
    with running(folder / "run") as run, watching(folder / "prometheus", run.targets) as prometheus:
        scene = Watched(run=run, prometheus=prometheus, began_s=time.time())
        prometheus.until(
            lambda: bool(prometheus.query("penstock_evaluation_return != 0")), "an evaluation", PATIENCE_S
        )
        prometheus.until(lambda: len(run.versions()) > 1, "two versions", PATIENCE_S)
        run.try_versions()
        run.kill("actor-0")
        run.kill("broker")
        deadline = time.monotonic() + PATIENCE_S
        left = QUERIES
        while left and time.monotonic() < deadline:
            run.err()
            left = [(panel, query) for panel, query in left if not scene.is_shown(panel, query)]
        yield scene


@pytest.mark.parametrize(
    ("panel", "query"), QUERIES, ids=lambda one: getattr(one, "title", None) or getattr(one, "legend", "")
)
def test_a_panel_shows_the_values_of_the_run(watched: Watched, panel: Panel, query: Query) -> None:
    values, key = watched.values(query), (panel.dashboard, panel.title, query.legend)
    if key in NO_SERIES:
        assert values == [], f"{key} has values: take it off the list"
        return
    assert values, f"{query.asked(window=WINDOW)} is empty"
    assert any(values) or key in NOTHING_WRONG, f"{query.asked(window=WINDOW)} is always 0"


def test_the_lists_of_quiet_panels_name_existing_panels() -> None:
    assert nowhere(NOTHING_WRONG.keys() | NO_SERIES.keys()) == set()


@pytest.mark.parametrize(("alert", "expression"), ALERTS, ids=[name for name, _ in ALERTS])
def test_an_alert_queries_existing_series(watched: Watched, alert: str, expression: str) -> None:
    watched.prometheus.query(expression.lstrip("|"))
    selectors = re.findall(r"penstock[_:]\w+(?:\{[^}]*\})?", expression)
    assert selectors
    for selector in selectors:
        there = watched.prometheus.query(f"last_over_time({selector}[2m])")
        assert there or "certificate" in selector or "_gateway_" in selector, selector


def test_every_alert_was_read_from_the_file() -> None:
    assert [name for name, _ in ALERTS] == re.findall(r"- alert: (\w+)", (RULES / "alerts.yml").read_text())


def test_prometheus_reaches_every_process(watched: Watched) -> None:
    names = {"launcher", "redis", "broker", "learner", "actor-0", "actor-1", "server", "evaluator"}
    watched.prometheus.until(
        lambda: {one["metric"]["instance"] for one in watched.prometheus.query("up == 1")} == names,
        "everybody",
    )
    (run,) = {one["metric"]["run"] for one in watched.prometheus.query("up")}
    assert run.startswith("cartpole-v1-")


def test_the_pictures_match_grafana(watched: Watched) -> None:
    view = View(prometheus=watched.prometheus, began_s=watched.began_s, ended_s=time.time(), scrape_s=STEP_S)
    file = next(file for file in queries.files() if file.stem == "serving")
    figure = draw(file, view)
    drawn = {axes.get_title(loc="left") or axes.get_title(): axes for axes in figure.axes}
    assert drawn.keys() == {panel.title for panel in queries.panels(file)}
    empty = {title for title, axes in drawn.items() if "no data" in {text.get_text() for text in axes.texts}}
    assert empty == {title for _, title, _ in OF_TEXT}
