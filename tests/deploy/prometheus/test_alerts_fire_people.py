"""Alerts on a gateway fire for real, their causes come and go; and its dashboard shows what people do."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import httpx2

from deploy.grafana import queries
from tests.deploy.prometheus.alert_scenes import PATIENCE_S, going_on, watched
from tests.deploy.prometheus.prometheus_server import needs_prometheus
from tests.support.gateway.gateway_stand import PASSWORD, end_jobs, operator
from tests.support.gateway.job_templates import write_templates
from tests.support.run.harness import GatewayProcess
from tests.support.storage.postgresql_server import PostgresqlServer, find_programs

pytestmark = [
    needs_prometheus,
    pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

JOBS: Final = "/api/projects/alpha/jobs"
WINDOW: Final = "10s"
QUIET: Final = {("Errors", "{{run}}"): "no database is gone", ("Jobs queued", "{{run}}"): "one job at a time"}
"""Panels that may show only 0 here."""


class People:
    """A gateway on PostgreSQL with an owner of `alpha` and a program."""

    def __init__(self, folder: Path, server: PostgresqlServer) -> None:
        self.server = server
        write_templates(folder / "templates")
        url = server.new_database("gateway")
        database = ("--database", url)
        operator(folder, "user", "add", "ada", "--project", "alpha", *database, stdin=f"{PASSWORD}\n")
        token = operator(folder, "token", "add", "ci", "--project", "alpha", *database).stdout.strip()
        self.gateway = GatewayProcess(folder, *database, "--registry", url, "--templates", "templates")
        self.headers = {"Authorization": f"Bearer {token}"}

    def call(self, method: str, path: str, **more: Any) -> Any:
        url = f"{self.gateway.url}{path}"
        return httpx2.request(method, url, headers=self.headers, timeout=60, **more)

    def rate(self) -> None:
        self.call("POST", "/api/policies/feedback/a", json={"prompt": "p", "response": "r", "score": 0.5})

    def rate_many(self) -> None:
        line = json.dumps({"prompt": "p", "response": "r", "score": 0.5})
        self.call("POST", "/api/projects/alpha/agents/a/feedback", content="\n".join([line] * 1000))

    def submit(self, template: str, **numbers: float) -> None:
        body = {"agent": template, "template": template, "numbers": numbers}
        reply = self.call("POST", JOBS, json=body)
        assert reply.status_code == 201, reply.text

    def try_password(self) -> None:
        form = {"grant_type": "password", "username": "ada", "password": "guess"}
        httpx2.post(f"{self.gateway.url}/api/auth/token", data=form, timeout=60)


@pytest.fixture
def people(tmp_path: Path) -> Iterator[People]:
    programs = find_programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))
    server = PostgresqlServer(programs, folder)
    try:
        server.start()
        people = People(tmp_path, server)
        with people.gateway:
            yield people
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
        end_jobs(tmp_path)


def test_a_database_that_is_gone_raises_an_alert(people: People, tmp_path: Path) -> None:
    with (
        watched(tmp_path, gateway=people.gateway.endpoint) as scene,
        going_on(lambda: people.call("GET", "/api/me")),
    ):
        people.server.stop()
        scene.fires("PenstockGatewayErrors")
        people.server.start()
        scene.clears("PenstockGatewayErrors")


def test_a_training_that_fails_raises_an_alert(people: People, tmp_path: Path) -> None:
    with watched(tmp_path, gateway=people.gateway.endpoint) as scene:
        people.submit("wrong")
        scene.fires("PenstockJobsFailing")
        scene.clears("PenstockJobsFailing")


def test_a_training_that_is_stuck_raises_an_alert(people: People, tmp_path: Path) -> None:
    with watched(tmp_path, gateway=people.gateway.endpoint) as scene:
        people.submit("quick", maxSteps=100_000)
        scene.until_seen("penstock_gateway_job_heard_timestamp_seconds > 0")
        (begun,) = tmp_path.rglob("jobs/*/begun.json")
        group = json.loads(begun.read_text())["group"]
        os.killpg(group, signal.SIGSTOP)
        scene.fires("PenstockJobStuck")
        os.killpg(group, signal.SIGCONT)
        scene.clears("PenstockJobStuck")


def test_a_flood_of_ratings_raises_an_alert(people: People, tmp_path: Path) -> None:
    with watched(tmp_path, gateway=people.gateway.endpoint) as scene:
        scene.follows("PenstockRatingFlood", going_on(people.rate_many))


def test_guessed_passwords_raise_an_alert(people: People, tmp_path: Path) -> None:
    with watched(tmp_path, gateway=people.gateway.endpoint) as scene:
        scene.follows("PenstockSignInsRefused", going_on(people.try_password))


def test_the_dashboard_shows_what_people_do(people: People, tmp_path: Path) -> None:
    (file,) = [one for one in queries.files() if one.stem == "people"]
    asked = [(panel, query) for panel in queries.panels(file) for query in panel.queries]
    began_s = time.time()
    with watched(tmp_path, gateway=people.gateway.endpoint) as scene:
        people.submit("quick")
        with going_on(people.rate), going_on(people.try_password):

            def is_shown(panel: queries.Panel, query: queries.Query) -> bool:
                text = query.asked(window=WINDOW)
                found = scene.prometheus.query_range(text, began_s, time.time(), 1.0)
                values = [float(value) for one in found for _, value in one["values"] if value != "NaN"]
                return bool(values) and (any(values) or (panel.title, query.legend) in QUIET)

            left = asked
            deadline = time.monotonic() + PATIENCE_S
            while left and time.monotonic() < deadline:
                left = [(panel, query) for panel, query in left if not is_shown(panel, query)]
    assert [(panel.title, query.legend) for panel, query in left] == []
