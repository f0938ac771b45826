"""What a person may do is offered to the browser that was let in, and to no other."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra `ui`")

from fastapi.testclient import TestClient

from penstock.gateway.frame.envelope import Doors
from penstock.launch.ui.application import Admission, make_app
from penstock.launch.ui.catalogue import Catalogue
from penstock.launch.ui.run_starter import RunStarter
from tests.support.run.left_run import make_run

DONE: Any = {
    "POST /api/runs": {"name": "mine"},
    "POST /api/runs/a/control/pause": {},
    "POST /api/runs/a/promote": {"version": 1, "reason": "x"},
    "POST /api/runs/a/rollback": {"reason": "x"},
    "PUT /api/runs/a/traffic": {"canaryShare": 0.1, "reason": "x"},
}
WEIGHTS = "/api/runs/a/versions/1/weights"


def app_of(folder: Path, admission: Admission) -> Any:
    """The application of a folder in which something may be done."""
    runs = Catalogue(folder)
    starter = RunStarter(folder, folder / "state")
    return make_app(runs, doors=Doors(), admission=admission, starter=starter)


def browser(app: Any) -> TestClient:
    """A browser of its own."""
    return TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


def test_only_the_browser_that_was_let_in_may_act(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={})
    admission = Admission()
    app = app_of(tmp_path, admission)
    mine, other = browser(app), browser(app)
    assert mine.get(f"/?secret={admission.secret}").status_code == 303
    for words, body in DONE.items():
        method, path = words.split()
        assert other.request(method, path, json=body).status_code == 401, words
        elsewhere = {"Origin": "https://evil.example"}
        assert mine.request(method, path, json=body, headers=elsewhere).status_code == 403, words
        form = mine.request(method, path, content=b"name=mine", headers={"Content-Type": "text/plain"})
        assert form.status_code == 422, words
    assert other.get("/api/settings").status_code == 401
    assert other.get(WEIGHTS).status_code == 401
    assert mine.get("/api/settings").json()["properties"]["learner"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_what_cannot_be_done_is_told_in_words(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={})
    admission = Admission()
    mine = browser(app_of(tmp_path, admission))
    mine.get(f"/?secret={admission.secret}")
    ended = mine.post("/api/runs/a/control/pause", json={})
    assert (ended.status_code, ended.json()["error"]) == (409, "conflict")
    assert mine.post("/api/runs/b/control/pause", json={}).status_code == 404
    assert mine.get(WEIGHTS).status_code == 409
    assert mine.get(WEIGHTS.replace("1", "x")).status_code == 422
    assert mine.get(WEIGHTS.replace("/a/", "/b/")).status_code == 404
    assert mine.post("/api/runs/..%2Fa/promote", json=DONE["POST /api/runs/a/promote"]).status_code == 404
    assert mine.post("/api/runs/a/promote", json=DONE["POST /api/runs/a/promote"]).status_code == 409
    assert mine.post("/api/runs/a/control/restore", json={}).json()["field"] == "name"
    wrong = mine.post("/api/runs", json={"name": "mine", "settings": {"seed": -1}})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "settings.seed")
    for name in ("..", "a/b", ".hidden", "", "x" * 65, "a\n"):
        reply = mine.post("/api/runs", json={"name": name})
        assert (reply.status_code, reply.json()["field"]) == (422, "name"), name


def test_no_action_is_offered_where_everybody_is_let_in(tmp_path: Path) -> None:
    runs = Catalogue(tmp_path)
    starter = RunStarter(tmp_path, tmp_path / "state")
    with pytest.raises(ValueError, match="need an admission"):
        make_app(runs, doors=Doors(), starter=starter)
