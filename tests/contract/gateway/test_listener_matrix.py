"""Every route of every listener, called at each of them by everybody: the table of the listener holds."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from penstock.client.text_calls import HttpReply, HttpRequest, json_reply
from penstock.gateway.application import gateway_listener, site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.route_access import Access, Listener, Table, TokenDoor, make_app
from penstock.gateway.store.tables import Role
from penstock.gateway.text_listener import text_listener
from penstock.gateway.upstream import RunAddresses, Upstream
from penstock.launch.ui.application import Admission
from penstock.launch.ui.application import make_app as page_app
from penstock.launch.ui.catalogue import Catalogue
from penstock.launch.ui.run_starter import RunStarter
from penstock.rpc.auth import Credentials
from penstock.workloads.chat.http.chat_routes import site as chat
from penstock.workloads.goals.http.goals_service import service as goals
from penstock.workloads.prompts.http.prompt_routes import site as prompts
from penstock.workloads.rlhf.policy_service import service as policies
from tests.support.gateway.small_gateway import SmallGateway

AT = "http://127.0.0.1"
PROJECT = {"Penstock-Project": "alpha"}
ENDS_ITS_CALLER = ("POST", "/api/auth/sign-out")
WITHOUT_END = "/api/events"


async def answer(_request: HttpRequest) -> HttpReply:
    """What an agent is told."""
    return json_reply({})


@pytest.fixture
def apps(small_gateway: SmallGateway, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The application of each listener, ready."""
    upstream = Upstream(addresses=RunAddresses, credentials=Credentials(), state=tmp_path)
    accounts, doors = small_gateway.accounts, Doors()
    door = TokenDoor(accounts=accounts, limits=small_gateway.parts.limits, project="alpha")
    text = text_listener(answer)
    made: dict[str, Listener] = {
        "gateway": gateway_listener(small_gateway.parts, doors, [goals(), policies()]),
        "chat": site_listener(chat(), upstream, doors, accounts, "alpha"),
        "prompts": site_listener(prompts(), upstream, doors, accounts, "alpha"),
        "text": Listener(**{name: getattr(text, name) for name in text.__slots__} | {"door": door}),
    }
    starter = RunStarter(tmp_path / "runs", tmp_path / "started")
    found = {name: make_app(one) for name, one in made.items()}
    found["page"] = page_app(Catalogue(tmp_path), doors=doors, admission=Admission(), starter=starter)
    with ExitStack() as stack:
        for name, app in found.items():
            if name in {"chat", "prompts"}:
                stack.enter_context(TestClient(app, base_url=AT))
        yield found


def table_of(app: Any) -> Table:
    """Who may call what."""
    found: Table = app.state.access
    return found


def called(app: Any, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of a call without a body, of things that do not exist."""
    place = path.replace("{project}", "alpha").replace("{", "").replace("}", "")
    client = TestClient(app, base_url=AT, raise_server_exceptions=False, follow_redirects=False)
    return client.request(method, place, headers=headers).status_code


def test_a_listener_has_its_own_routes_and_no_others(apps: dict[str, Any]) -> None:
    every = {one for app in apps.values() for one in table_of(app)}
    assert len(every) > 100
    for name, app in apps.items():
        for method, path in every - table_of(app).keys():
            assert called(app, method, path, {}) in {401, 404, 405}, (name, method, path)
    assert not table_of(apps["prompts"]).keys() & {("POST", "/v1/chat/completions"), ("GET", "/chat")}


def test_every_route_of_a_listener_admits_whom_its_table_says(
    small_gateway: SmallGateway, apps: dict[str, Any]
) -> None:
    for role in reversed(Role):
        small_gateway.person(role.value, "alpha", role)
    small_gateway.person("stranger", "beta", Role.OWNER)
    members = [(role, small_gateway.bearer(role.value) | PROJECT) for role in Role]
    outsiders = [small_gateway.bearer("stranger") | PROJECT, small_gateway.token("beta") | PROJECT]
    for name in ("gateway", "chat", "prompts", "text"):
        for (method, path), access in table_of(apps[name]).items():
            if access is Access.ANYBODY or (method, path) == ENDS_ITS_CALLER or path.endswith("/events"):
                continue
            what = (name, method, path)
            assert called(apps[name], method, path, {}) == 401, what
            if access is Access.KNOWN:
                continue
            for headers in outsiders:
                assert called(apps[name], method, path, headers) == (404 if name == "gateway" else 403), what
            for role, headers in members:
                found = called(apps[name], method, path, headers)
                assert (found not in {401, 403}) is role.includes(Role(access)), (*what, role, found)


def test_no_route_of_the_page_answers_without_the_cookie(apps: dict[str, Any]) -> None:
    app = apps["page"]
    mine = TestClient(app, base_url=AT, raise_server_exceptions=False, follow_redirects=False)
    assert mine.get("/", params={"secret": app.state.door.secret}).status_code == 303
    for method, path in table_of(app):
        assert called(app, method, path, {}) == 401, (method, path)
        if path != WITHOUT_END:
            assert (
                mine.request(
                    method, path.format(name="x", job="x", version=1, action="pause", file="main.js")
                ).status_code
                != 401
            )


def test_a_role_that_does_not_suffice_is_told_before_the_body_is_read(
    small_gateway: SmallGateway, apps: dict[str, Any]
) -> None:
    small_gateway.person("owner", "alpha", Role.OWNER)
    viewer = small_gateway.token("alpha", Role.VIEWER)

    asked = list[bool]()

    def body() -> Iterator[bytes]:
        asked.append(True)
        yield b"{}"

    client = TestClient(apps["prompts"], base_url=AT)
    for headers, status in (({}, 401), (viewer, 403)):
        sent = {**headers, "Content-Type": "application/json"}
        assert client.post("/save", content=body(), headers=sent).status_code == status
    assert not asked
