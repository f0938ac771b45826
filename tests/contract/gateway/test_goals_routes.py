"""The routes of the page of goals: who may decide, what a name may be, and what broken files lead to."""

import json
from pathlib import Path
from typing import Final

import pytest

from penstock.gateway.store.tables import Role
from penstock.workloads.goals.http.goals_service import service
from penstock.workloads.goals.injection_journal import VETOES, last_switch
from tests.support.gateway.injector_files import goal, write_goals
from tests.support.gateway.small_gateway import SmallGateway

INJECTORS: Final = "/api/projects/alpha/injectors"


@pytest.fixture
def gateway(tmp_path: Path) -> SmallGateway:
    """One with the routes of goals, and the injector `host` of alpha, which has proposed three goals."""
    folder = tmp_path / "injectors" / "alpha" / "host"
    folder.mkdir(parents=True)
    write_goals(folder, goal("waits"), goal("done", injected=True), goal("low", held="threshold"))
    url = f"sqlite:///{tmp_path}/accounts.sqlite"
    return SmallGateway.at(url, f"sqlite:///{tmp_path}/registry.sqlite", tmp_path, services=[service()])


def test_a_viewer_looks_and_an_editor_decides(gateway: SmallGateway, tmp_path: Path) -> None:
    viewer, editor = gateway.token("alpha", Role.VIEWER), gateway.token("alpha")
    listed = gateway.get(INJECTORS, viewer).json()["injectors"]
    assert [(one["name"], one["state"], one["auto"]) for one in listed] == [("host", "ended", False)]
    assert len(gateway.get(f"{INJECTORS}/host", viewer).json()["goals"]) == 3
    auto, veto = (f"{INJECTORS}/host/auto", {"on": True}), (f"{INJECTORS}/host/vetoes", {"goalId": "waits"})
    assert gateway.client.put(auto[0], json=auto[1], headers=viewer).status_code == 403
    assert gateway.client.post(veto[0], json=veto[1], headers=viewer).status_code == 403
    folder = tmp_path / "injectors" / "alpha" / "host"
    assert not (folder / VETOES).exists()
    for _ in range(2):
        assert gateway.client.put(auto[0], json=auto[1], headers=editor).status_code == 204
        assert gateway.client.post(veto[0], json=veto[1], headers=editor).status_code == 204
    assert gateway.actions("alpha").count("goal vetoed") == 2
    assert gateway.actions("alpha").count("injector switched") == 2
    found = last_switch(folder)
    assert found is not None
    assert (found.on, found.by.startswith("token/")) == (True, True)
    assert {json.loads(line)["goal_id"] for line in (folder / VETOES).read_text().splitlines()} == {"waits"}


@pytest.mark.parametrize(
    ("goal_id", "status", "word"),
    [
        ("done", 409, "carried out already"),
        ("low", 409, "not carried out anyway: threshold"),
        ("x", 404, "no such goal"),
    ],
)
def test_a_veto_that_holds_nothing_is_refused(
    gateway: SmallGateway, goal_id: str, status: int, word: str
) -> None:
    body = {"goalId": goal_id}
    reply = gateway.client.post(f"{INJECTORS}/host/vetoes", json=body, headers=gateway.token("alpha"))
    assert (reply.status_code, word in reply.json()["detail"]) == (status, True)


@pytest.mark.parametrize(
    "path", ["/absent", "/%2e%2e%2fbeta%2fhost", "/host%00", "/%2e%2e%2f%2e%2e%2falpha%2fhost"]
)
def test_a_name_is_looked_up_and_never_a_path(gateway: SmallGateway, tmp_path: Path, path: str) -> None:
    beside = tmp_path / "injectors" / "beta" / "host"
    beside.mkdir(parents=True)
    write_goals(beside, goal("secret"))
    reply = gateway.get(f"{INJECTORS}{path}", gateway.token("alpha"))
    assert reply.status_code in (404, 405), reply.text
    assert "secret" not in reply.text
    assert gateway.get("/api/projects/beta/injectors", gateway.token("alpha")).status_code in (403, 404)


def test_files_that_cannot_be_read_are_told(gateway: SmallGateway, tmp_path: Path) -> None:
    folder = tmp_path / "injectors" / "alpha" / "host"
    write_goals(folder, {**goal("waits"), "confidence": 7})
    viewer = gateway.token("alpha", Role.VIEWER)
    reply = gateway.get(f"{INJECTORS}/host", viewer)
    assert reply.status_code == 409
    assert "goal_injections.jsonl: a line near the end: confidence='7'" in reply.json()["detail"]
    assert gateway.get(INJECTORS, viewer).status_code == 200


def test_the_page_and_its_files_are_anybodys(gateway: SmallGateway) -> None:
    for path, kind in (("/rl", "text/html"), ("/rl/rl.js", "text/javascript"), ("/rl/rl.css", "text/css")):
        reply = gateway.client.get(path)
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(kind)
    assert gateway.client.get("/rl/goals_service.py").status_code == 404
    assert gateway.client.get(INJECTORS).status_code == 401
