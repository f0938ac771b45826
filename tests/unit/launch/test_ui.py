import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from penstock.config.algorithm_sections import SECTIONS
from penstock.config.run_folder import CONFIG_FILE, LOCK_FILE, MAX_BYTES
from penstock.config.settings import ConfigurationError, Settings
from penstock.gateway.frame.envelope import Doors
from penstock.launch.cli.app import ui
from penstock.launch.run.supervisor import penstock
from penstock.launch.ui import application
from penstock.launch.ui.application import Admission, live, make_app
from penstock.launch.ui.catalogue import Catalogue
from penstock.launch.ui.run_starter import CannotStart, RunStarter, settings_schema
from penstock.launch.ui.server import Page
from penstock.registry.records import NewVersion, Origin
from penstock.registry.registry import Registry
from tests.support.run.solved_run import SECRET, make_run
from tests.support.storage.postgresql_server import with_registry

# ---- What a person may do is offered to the browser that was let in, and to no other.


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


def test_only_an_admitted_browser_may_act(tmp_path: Path) -> None:
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


def test_an_impossible_action_is_explained(tmp_path: Path) -> None:
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


def test_a_page_open_to_everybody_offers_no_action(tmp_path: Path) -> None:
    runs = Catalogue(tmp_path)
    starter = RunStarter(tmp_path, tmp_path / "state")
    with pytest.raises(ValueError, match="need an admission"):
        make_app(runs, doors=Doors(), starter=starter)


# ---- What a page that looks at runs is sent: everything once, then what changes.


def parsed(text: str) -> tuple[str, Any]:
    """Kind and content of an event."""
    kind, data = text.rstrip("\n").split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_everything_is_sent_once_and_then_only_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "LOOK_S", 0.01)
    for name in ("a", "b"):
        make_run(tmp_path / name, summary={})

    async def listen() -> None:
        stream = live(Catalogue(tmp_path), "a", ["b"], can_act=True)
        first = [parsed(await anext(stream)) for _ in range(5)]
        assert [kind for kind, _ in first] == ["runs", "run", "versions", "curve", "curve"]
        assert first[0][1]["can_act"]
        assert {row["name"] for row in first[0][1]["runs"]} == {"a", "b"}
        assert [content["name"] for _, content in first[3:]] == ["a", "b"]
        with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
            file.write('{"env_steps": 300, "training_seconds": 2.0, "updates": 3, "mean_return": 9.0}\n')
        (runs, rows), (kind, curve) = [parsed(await anext(stream)) for _ in range(2)]
        assert (runs, kind, curve["name"]) == ("runs", "curve", "b"), "of the other run nothing is new"
        assert curve["columns"]["mean_return"][-1] == 9.0
        assert rows["runs"][0]["env_steps"] == 300 or rows["runs"][1]["env_steps"] == 300
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen())


def test_an_absent_run_is_reported_by_its_own_event(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={})

    async def listen() -> None:
        stream = live(Catalogue(tmp_path), "a", ["../a"])
        found = [parsed(await anext(stream)) for _ in range(5)]
        assert [kind for kind, _ in found] == ["runs", "run", "versions", "curve", "trouble"]
        assert (found[-1][1]["status"], found[-1][1]["run"]) == (404, "../a")
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen())


def test_a_stream_without_news_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "LOOK_S", 0.001)

    async def listen() -> None:
        stream = live(Catalogue(tmp_path), "", ())
        assert parsed(await anext(stream))[0] == "runs"
        assert (await anext(stream)).startswith(":")
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen())


# ---- What is refused before a training is started; trainings themselves are started by tests of
# processes.


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"learner": {"total_steps": 0}}, "settings.learner.total_steps"),
        ({"learner": {"unheard": 1}}, "settings.learner.unheard"),
        ({"algorithm": {"name": "unheard"}}, "settings.algorithm.name"),
        ({"seed": None}, "settings.seed"),
        ({"learner": {"target_return": None}}, "settings.learner.target_return"),
        ({"environment": {"kwargs": {"deep": [None]}}}, "settings.environment.kwargs.deep.0"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_made(
    tmp_path: Path, settings: dict[str, Any], field: str
) -> None:
    starter = RunStarter(tmp_path / "runs", tmp_path / "state")
    (tmp_path / "runs").mkdir()
    with pytest.raises(CannotStart) as refused:
        starter.start("mine", settings)
    assert refused.value.field == field, refused.value
    assert list((tmp_path / "runs").iterdir()) == []
    assert not (tmp_path / "state").exists()


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(CannotStart, match="choose another") as refused:
        RunStarter(tmp_path, tmp_path / "state").start("mine", {})
    assert refused.value.field == "name"


def test_no_training_is_started_inside_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(CannotStart, match="on the folder above it"):
        RunStarter(run, tmp_path / "state").start("mine", {})


# ---- The page's answers, without a browser: runs on disk as runs leave them.


testclient = pytest.importorskip("fastapi.testclient", reason="the page needs the extra `ui`")


def client(folder: Path, *, any_host: bool = False, host: str = "127.0.0.1") -> Any:
    """A client that asks on loopback."""
    app = make_app(Catalogue(folder), doors=Doors(any_host=any_host))
    return testclient.TestClient(app, base_url=f"http://{host}")


def test_runs_are_listed_with_their_ending(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={"solved": True, "target_return": 475.0, "env_steps_per_second": 9.5})
    make_run(tmp_path / "b", summary={"interrupted": True})
    make_run(tmp_path / "c", summary={"failure": "the disk is full"})
    make_run(tmp_path / "d", summary={})
    make_run(tmp_path / "e")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / CONFIG_FILE).write_text("[another]\n")
    listed = client(tmp_path).get("/api/runs").json()
    assert {one["name"]: one["state"] for one in listed["runs"]} == {
        "a": "solved",
        "b": "interrupted",
        "c": "failed",
        "d": "ended",
        "e": "ended",
    }
    run = next(one for one in listed["runs"] if one["name"] == "a")
    assert (run["env_steps"], run["mean_return"], run["seed"]) == (200, 2.0, 4)
    assert (run["target_return"], run["steps_per_second"]) == (475.0, 9.5)


def test_for_the_folder_of_a_run_only_it_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "b")
    assert [one["name"] for one in client(tmp_path / "a" / "b").get("/api/runs").json()["runs"]] == ["b"]
    assert client(tmp_path / "gone").get("/api/runs").json()["runs"] == []


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_listed(tmp_path: Path) -> None:
    (make_run(tmp_path / "a") / CONFIG_FILE).write_text("[unheard]\nof = 1\n")
    make_run(tmp_path / "b")
    asking = client(tmp_path)
    assert {one["name"] for one in asking.get("/api/runs").json()["runs"]} == {"a", "b"}
    reply = asking.get("/api/runs/a/versions")
    assert "unheard: unknown key" in reply.json()["note"]


def test_a_curve_is_sent_as_growing_columns(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    asking = client(tmp_path)
    curve = asking.get("/api/runs/a/curve").json()
    assert curve == {
        "env_steps": [0, 100, 200],
        "seconds": [0.0, 0.5, 1.0],
        "mean_return": [None, 1.0, 2.0],
        "staleness": [None, 1.0, 1.0],
        "version": [0, 1, 2],
        "rate": [None, 200.0, 200.0],
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 300, "training_seconds": 2.0, "updates": 3, "mean_return": Infinity}\n')
    curve = asking.get("/api/runs/a/curve").json()
    assert (curve["env_steps"][-1], curve["mean_return"][-1], curve["rate"][-1]) == (300, None, 100.0)


def test_an_ended_run_is_shown_without_processes(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={"solved": False, "failure": "no update for 300 s"})
    detail = client(tmp_path).get("/api/runs/a").json()
    assert detail["now"] is None
    assert detail["run"]["state"] == "failed"
    assert detail["summary"]["failure"] == "no update for 300 s"


def test_versions_come_from_the_registry(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    asking = client(tmp_path)
    assert "no version is registered yet" in asking.get("/api/runs/a/versions").json()["note"]
    with Registry.open(with_registry(f"sqlite:///{folder / 'registry.sqlite'}"), migrate=True) as registry:
        for number in (3, 8):
            new = NewVersion(
                policy="default",
                version=number,
                run="a",
                update=number - 1,
                sha256="0" * 64,
                size_bytes=10,
                origin=Origin.BEST,
            )
            registry.register(new, by="test")
    versions = asking.get("/api/runs/a/versions").json()
    assert [one["version"] for one in versions["versions"]] == [8, 3]
    assert versions["note"] == ""
    assert versions["traffic"]["policy"] == "default"


@pytest.mark.parametrize(
    "name", ["nowhere", "..", "%2e%2e", "..%2fa", "a%2f..%2fa", "%2fetc%2fpasswd", "a%00", "notes"]
)
@pytest.mark.parametrize("part", ["", "/curve", "/versions"])
def test_an_unlisted_name_is_not_found(tmp_path: Path, name: str, part: str) -> None:
    make_run(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "metrics.jsonl").write_text('{"env_steps": 1}\n')
    reply = client(tmp_path).get(f"/api/runs/{name}{part}")
    assert reply.status_code == 404
    assert "env_steps" not in reply.text


def test_the_page_can_change_nothing_and_shows_no_secret(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={"solved": True})
    asking = client(tmp_path)
    for path in ("/", "/api/runs", "/api/runs/a", "/api/runs/a/curve", "/api/runs/a/versions"):
        reply = asking.get(path)
        assert reply.status_code == 200
        assert SECRET not in reply.text
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert asking.request(method, path).status_code == 405
    for path in ("/docs", "/redoc", "/openapi.json", "/static/main.js", "/../pyproject.toml", "/app.py"):
        assert asking.get(path).status_code == 404


def test_every_file_of_the_page_is_served_under_a_strict_policy(tmp_path: Path) -> None:
    asking = client(tmp_path)
    page = asking.get("/")
    assert page.headers["content-type"].startswith("text/html")
    files = [
        "/page.css",
        "/flow.css",
        "/main.js",
        "/api.js",
        "/chart.js",
        "/dom.js",
        "/flow.js",
        "/runs.js",
        "/start.js",
        "/steer.js",
        "/theme.js",
        "/icon.svg",
        "/vendor/uPlot.iife.min.js",
        "/vendor/uPlot.min.css",
    ]
    for reply in (page, *map(asking.get, files), asking.get("/api/runs"), asking.get("/nowhere")):
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    texts = {file: asking.get(file) for file in ("/", *files)}
    assert all(reply.status_code == 200 for reply in texts.values())
    for file, reply in texts.items():
        assert "innerHTML" not in reply.text, file
        elsewhere = reply.text
        for name in ("http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"):
            elsewhere = elsewhere.replace(name, "")  # names, nothing that is loaded
        assert "http://" not in elsewhere
        assert "https://" not in elsewhere


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1"]
)
def test_another_hosts_name_is_refused(tmp_path: Path, host: str) -> None:
    assert client(tmp_path, host=host).get("/api/runs").status_code == 421
    assert client(tmp_path, host=host, any_host=True).get("/api/runs").status_code == 200


@pytest.mark.parametrize("host", ["localhost:8470", "127.0.0.1:8470", "[::1]:8470"])
def test_loopback_has_several_names(tmp_path: Path, host: str) -> None:
    assert client(tmp_path, host=host).get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0:0", "beyond loopback anybody could read the page"),
        ("192.0.2.1:80", "or say --insecure"),
        ("8470", "write HOST:PORT"),
        ("unix:/tmp/page", "write HOST:PORT"),
    ],
)
def test_an_address_beyond_loopback_is_refused(tmp_path: Path, address: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Page(tmp_path, address, insecure=False)


def test_without_its_extra_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'penstock-rl\[ui\]'"):
        Page(tmp_path, "127.0.0.1:0", insecure=False)


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="choose another port, or 0"):
            Page(tmp_path, address, insecure=False)


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_the_page_in_the_foreground_serves_until_told_to_end(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    make_run(tmp_path / "a")
    command = penstock("ui", str(tmp_path), "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        here = url.partition("?")[0]
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with pytest.raises(urllib.error.HTTPError, match="401"):
            browser.open(f"{here}api/runs", timeout=60)
        browser.open(url, timeout=60).close()
        with browser.open(f"{here}api/runs", timeout=60) as reply:
            assert [one["name"] for one in json.loads(reply.read())["runs"]] == ["a"]
        process.send_signal(number)
        assert process.stdout.read() == ""
    assert process.returncode == code


def browser_at(folder: Path, admission: Admission) -> Any:
    """A browser that has not been let in; it keeps cookies."""
    app = make_app(Catalogue(folder), doors=Doors(), admission=admission)
    return testclient.TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


def test_the_secret_in_the_address_admits_one_browser_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    admission = Admission()
    app = make_app(Catalogue(tmp_path), doors=Doors(), admission=admission)
    mine, other = (
        testclient.TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) for _ in range(2)
    )
    for path in ("/", "/main.js", "/api/runs", "/?secret=guess", "/?secret=", "/api/runs?secret=x"):
        assert mine.get(path).status_code == 401, path
    entered = mine.get(f"/?secret={admission.secret}")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    words = {word.strip().lower() for word in entered.headers["set-cookie"].split(";")}
    assert {"httponly", "samesite=strict", "path=/"} <= words
    assert admission.secret not in entered.headers["set-cookie"]
    assert mine.get("/").status_code == mine.get("/api/runs").status_code == 200
    assert mine.get(f"/?secret={admission.secret}").status_code == 303, "its own address again"
    for path in (f"/?secret={admission.secret}", "/api/runs"):
        assert other.get(path).status_code == 401
    other.cookies.set(admission.cookie, "guess")
    assert other.get("/api/runs").status_code == 401


def test_a_page_elsewhere_can_neither_ask_nor_frame(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    admission = Admission()
    browser = browser_at(tmp_path, admission)
    browser.get(f"/?secret={admission.secret}")
    for origin in ("https://evil.example", "http://127.0.0.1:1", "null", "http://127.0.0.1.evil.example"):
        assert browser.get("/api/runs", headers={"Origin": origin}).status_code == 403, origin
    assert browser.get("/api/runs", headers={"Origin": "http://127.0.0.1"}).status_code == 200
    assert browser.get("/api/runs", headers={"Host": "evil.example"}).status_code == 421
    assert "frame-ancestors 'none'" in browser.get("/").headers["content-security-policy"]


def test_the_command_listens_on_loopback_by_default() -> None:
    assert ui.__defaults__ is not None
    assert "127.0.0.1:8470" in ui.__defaults__
    assert False in ui.__defaults__


BROKEN: dict[str, tuple[str, bytes]] = {
    "empty": ("summary.json", b""),
    "half": ("summary.json", b'{"solved": tr'),
    "list": ("summary.json", b"[1,2]"),
    "latin": (CONFIG_FILE, 'run = "größe"'.encode("latin-1")),
    "toml": (CONFIG_FILE, b"run = "),
    "nested": (CONFIG_FILE, b"run = " + b"[" * 5000 + b"]" * 5000),
    "processes": ("endpoints.json", b"[]"),
    "deep": ("endpoints.json", b"[" * 100_000),
    "pid": ("endpoints.json", b'{"a": {"role": "broker", "pid": "x", "metrics_port": 1}}'),
    "negative": ("endpoints.json", b'{"a": {"role": "broker", "pid": -1, "metrics_port": 1}}'),
    "port": ("endpoints.json", b'{"a": {"role": "broker", "pid": 1, "metrics_port": 70000}}'),
    "role": ("endpoints.json", b'{"a": {"role": [], "pid": 1, "metrics_port": 1}}'),
    "large": ("summary.json", b" " * (MAX_BYTES + 1)),
}


def test_an_unreadable_run_names_the_cause_and_hides_no_other(tmp_path: Path) -> None:
    make_run(tmp_path / "good", summary={"solved": True})
    for name, (file, content) in BROKEN.items():
        (make_run(tmp_path / name, summary={}) / file).write_bytes(content)
    asked = client(tmp_path)
    rows = {row["name"]: row for row in asked.get("/api/runs").json()["runs"]}
    assert rows["good"]["state"] == "solved"
    assert {name for name, row in rows.items() if row["state"] == "unreadable"} == BROKEN.keys()
    assert all(BROKEN[name][0] in row["why"] for name, row in rows.items() if row["why"])
    for name in BROKEN:
        for part in ("", "/curve", "/versions"):
            assert asked.get(f"/api/runs/{name}{part}").status_code == 200, (name, part)


def a_pipe(file: Path) -> None:
    """Make a pipe without a writer."""
    os.mkfifo(file)


def a_link_to_itself(file: Path) -> None:
    """It leads nowhere."""
    file.symlink_to(file.name)


def a_link_through_a_file(file: Path) -> None:
    """As if that were a folder."""
    file.symlink_to(f"{CONFIG_FILE}/{file.name}")


def a_device(file: Path) -> None:
    """It never ends."""
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [a_pipe, a_link_to_itself, a_link_through_a_file, a_device])
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "endpoints.json"])
def test_a_pipe_device_or_looping_link_hides_no_run_and_is_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make_run(tmp_path / "good", summary={"solved": True})
    run = make_run(tmp_path / "odd", summary={})
    (run / LOCK_FILE).touch()
    (run / name).unlink(missing_ok=True)
    make(run / name)
    asked = client(tmp_path)
    rows = {row["name"]: row for row in asked.get("/api/runs").json()["runs"]}
    assert (rows["good"]["state"], rows["odd"]["state"]) == ("solved", "unreadable")
    assert name in rows["odd"]["why"]
    for part in ("", "/curve", "/versions"):
        assert asked.get(f"/api/runs/odd{part}").status_code in {200, 409}, part


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    "summary",
    [f'{{"target_return": {DEEP}}}', f'{{"other": {DEEP}}}', '{"\\ud800": 1}', '{"target_return": "<b>"}'],
)
def test_a_summary_that_no_run_wrote_hides_no_run(tmp_path: Path, summary: str) -> None:
    make_run(tmp_path / "good", summary={"solved": True})
    (make_run(tmp_path / "odd", summary={}) / "summary.json").write_text(summary)
    asked = client(tmp_path)
    rows = {row["name"]: row for row in asked.get("/api/runs").json()["runs"]}
    assert rows["good"]["state"] == "solved"
    assert rows["odd"]["target_return"] in {None, 475.0}
    assert asked.get("/api/runs/odd").status_code in {200, 409}


def test_lines_that_no_learner_wrote_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", summary={})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"env_steps":"x"}\n{"env_steps": 1e999}\n{nonsense}\n{"env_steps": [1]}\n\xff\n')
        file.write(b'{"env_steps": 1%s}\n{"training_seconds": -1%s}\n' % (b"0" * 400, b"0" * 400))
    asked = client(tmp_path)
    assert asked.get("/api/runs/run/curve").json()["env_steps"] == [0, 100, 200]
    assert asked.get("/api/runs").json()["runs"][0]["env_steps"] == 200


def test_a_name_that_is_no_text_is_shown_and_found(tmp_path: Path) -> None:
    make_run(tmp_path / "good", summary={})
    shutil.copytree(tmp_path / "good", tmp_path / os.fsdecode(b"r\xff"), dirs_exist_ok=True)
    asked = client(tmp_path)
    assert {row["name"] for row in asked.get("/api/runs").json()["runs"]} == {"good", "r\\xff"}
    assert asked.get("/api/runs/r%5Cxff").json()["run"]["state"] == "ended"


def test_ending_with_a_page_open_in_a_browser_is_no_defect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path / "a")
    with Page(tmp_path, "127.0.0.1:0", insecure=False) as page:
        host, port = page.url.removeprefix("http://").rstrip("/").split(":")
        connection = socket.create_connection((host, int(port)), timeout=20)
        connection.sendall(f"GET /api/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        reply = b""
        while b"\n\n" not in reply:
            reply += connection.recv(65536)
    with connection:
        while part := connection.recv(65536):
            reply += part
    assert reply.endswith(b"0\r\n\r\n")
    assert [one.getMessage() for one in caplog.records if one.levelname in {"WARNING", "ERROR"}] == []


# ---- The schema that the form is made from: whole, and with its lines of help.


def properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every setting in it, sections in sections too."""
    found = list[tuple[str, dict[str, Any]]]()
    for name, one in schema["properties"].items():
        found += properties(one) if "properties" in one else [(name, one)]
    return found


def test_every_setting_is_there_with_its_line_of_help() -> None:
    schema = settings_schema()
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert set(SECTIONS) <= set(schema["algorithms"])
    sections = [schema, *schema["algorithms"].values()]
    told = [(name, one["description"]) for section in sections for name, one in properties(section)]
    assert len(told) > 150
    assert [name for name, text in told if not text] == []
    learner = schema["properties"]["learner"]["properties"]
    assert learner["total_steps"]["advanced"] is False
    assert schema["algorithms"]["ppo"]["properties"]["dual_clip"]["advanced"] is True
    assert "Passes over each batch" in schema["algorithms"]["ppo"]["properties"]["epochs"]["description"]
    json.dumps(schema, allow_nan=False)
