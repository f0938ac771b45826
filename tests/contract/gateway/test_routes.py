import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.testclient import TestClient

from penstock.client.text_calls import HttpReply, HttpRequest, json_reply
from penstock.gateway.accounts import users
from penstock.gateway.accounts import users as passwords
from penstock.gateway.application import gateway_listener, site_listener
from penstock.gateway.frame.envelope import REQUESTS, Doors
from penstock.gateway.frame.route_access import (
    ACCESS,
    PROJECT_HEADER,
    Access,
    Listener,
    Table,
    TokenDoor,
    make_app,
)
from penstock.gateway.store.tables import Role
from penstock.gateway.text_listener import text_listener
from penstock.gateway.upstream import RunAddresses, Upstream
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.ui.application import Admission
from penstock.launch.ui.application import make_app as page_app
from penstock.launch.ui.catalogue import Catalogue
from penstock.launch.ui.run_starter import RunStarter
from penstock.rpc.auth import Credentials
from penstock.runtime.metrics import exposition
from penstock.workloads.chat.http.chat_routes import site as chat
from penstock.workloads.goals.http.goals_service import service as goals
from penstock.workloads.goals.injection_journal import INJECTIONS
from penstock.workloads.prompts.http.prompt_routes import site as prompts
from penstock.workloads.rlhf.policy_service import service as policies
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway

# ---- Every route of the gateway and its services, called by everybody, in every project: the one table
# holds.


BODIES: Final[dict[str, Any]] = {
    "{user}": {"role": "viewer"},
    "promote": {"version": 1, "reason": "r"},
    "rollback": {"reason": "r"},
    "traffic": {"reason": "r"},
    "auto": {"on": True},
    "vetoes": {"goalId": "g"},
}
"""What routes that change something want to be told, by the last word of their path."""
PROJECTS = {"own": "alpha", "other": "beta", "absent": "gamma"}


@dataclass(frozen=True)
class Caller:
    """Somebody who calls. role: in the project `alpha`, None for an outsider."""

    name: str
    headers: dict[str, str]
    role: Role | None
    is_person: bool = True


@pytest.fixture
def gateway(database_url: str, tmp_path: Path) -> SmallGateway:
    """One with all services that workloads add, and a template of jobs."""
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    runner = LocalRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))
    return SmallGateway.at(database_url, registry, tmp_path, runner=runner, services=[policies(), goals()])


@pytest.fixture
def callers(gateway: SmallGateway) -> list[Caller]:
    """Members of each role, programs, one who belongs elsewhere; `beta` has an owner of its own."""
    for role in reversed(Role):  # the owner adds the project
        gateway.person(role.value, "alpha", role)
    gateway.person("stranger", "beta", Role.OWNER)
    people = [Caller(role.value, gateway.bearer(role.value), role) for role in Role]
    programs = [
        Caller(f"{role} token", gateway.token("alpha", role), role, is_person=False)
        for role in (Role.VIEWER, Role.EDITOR)
    ]
    outsiders = [
        Caller("stranger", gateway.bearer("stranger"), None),
        Caller("token of beta", gateway.token("beta"), None, is_person=False),
    ]
    return [*people, *programs, *outsiders]


def called(gateway: SmallGateway, method: str, path: str, caller: dict[str, str], project: str) -> Any:
    """The answer to a call without a body, of things that do not exist."""
    place = path.format_map(_Filled(project))
    headers = caller | ({} if "{project}" in path else {PROJECT_HEADER: project})
    return gateway.client.request(method, place, headers=headers)


class _Filled(dict[str, str]):
    """Fills a path: the project, and names of nothing for the rest."""

    def __init__(self, project: str) -> None:
        super().__init__(project=project)

    def __missing__(self, key: str) -> str:
        return "nothing"


def test_every_route_admits_the_roles_in_the_table(gateway: SmallGateway, callers: list[Caller]) -> None:
    for (method, path), access in table_of(gateway).items():
        place = f"{method} {path}"
        if access is not Access.ANYBODY:
            assert called(gateway, method, path, {}, "alpha").status_code == 401, place
        if access not in {Access.ANYBODY, Access.KNOWN}:
            for caller in callers:
                check(gateway, method, path, caller, Role(access))


def table_of(gateway: SmallGateway) -> Table:
    """Who may call what, services included."""
    found: Table = gateway.client.app.state.access  # type: ignore[attr-defined]
    assert found.keys() == ACCESS.keys() | policies().access.keys() | goals().access.keys()
    return found


def check(gateway: SmallGateway, method: str, path: str, caller: Caller, least: Role) -> None:
    """One caller of one route, in all three projects."""
    what = (method, path, caller.name)
    own, other, absent = (
        called(gateway, method, path, caller.headers, PROJECTS[which]) for which in ("own", "other", "absent")
    )
    if caller.role is None:
        assert (own.status_code, own.json()) == (404, absent.json()), what
        return
    if caller.role.includes(least):
        assert own.status_code not in {401, 403}, what
        assert "no such project" not in own.text, what
    else:
        assert (own.status_code, own.json()["error"]) == (403, "forbidden"), what
    assert other.status_code == absent.status_code == 404, what
    assert other.json() == absent.json(), what


def test_objects_of_another_project_are_not_found(
    gateway: SmallGateway, callers: list[Caller], tmp_path: Path
) -> None:
    theirs = things_of_beta(gateway, tmp_path)
    before = seen_by_beta(gateway)
    about = [place for place in table_of(gateway) if set(re.findall(r"{(\w+)}", place[1])) & theirs.keys()]
    assert len(about) == 17
    for caller in callers:
        for method, path in about:
            if caller.role is None or not caller.role.includes(Role(table_of(gateway)[method, path])):
                continue
            place = path.format(project="alpha", action="pause", version=1, **theirs)
            body = {} if method in {"GET", "DELETE"} else {"json": BODIES.get(path.rpartition("/")[2], {})}
            reply = gateway.client.request(method, place, headers=caller.headers, **body)
            assert (reply.status_code, reply.json()["error"]) == (404, "not_found"), (
                method,
                path,
                reply.text,
            )
    events = f"/api/projects/alpha/events?job={theirs['job']}"
    assert gateway.get(events, gateway.bearer("owner")).status_code == 404
    assert seen_by_beta(gateway) == before


def things_of_beta(gateway: SmallGateway, folder: Path) -> dict[str, str]:
    """Something of each kind in `beta`, by what paths call it."""
    owner = gateway.bearer("stranger")
    ids = {"user": gateway.people["stranger"], "injector": "host"}
    for name, path, body in (
        ("job", "jobs", {"agent": "a", "template": "quick"}),
        ("token", "tokens", {"name": "nightly"}),
        ("link", "agents/a/links", {"items": [{"prompt": "p", "response": "r"}]}),
    ):
        reply = gateway.client.post(f"/api/projects/beta/{path}", json=body, headers=owner)
        assert reply.status_code == 201, reply.text
        ids[name] = reply.json()["id"]
    place = folder / "injectors" / "beta" / "host"
    place.mkdir(parents=True)
    (place / INJECTIONS).touch()
    return ids


def seen_by_beta(gateway: SmallGateway) -> list[Any]:
    """What its owner sees of them."""
    owner = gateway.bearer("stranger")
    paths = ("members", "jobs", "tokens", "agents/a/links", "injectors")
    return [gateway.get(f"/api/projects/beta/{path}", owner).json() for path in paths]


def test_a_route_without_an_access_rule_is_not_served(small_gateway: SmallGateway) -> None:
    from fastapi import APIRouter

    from penstock.gateway.frame.route_access import GuardedRoute, Listener, make_app

    unguarded, guarded = APIRouter(), APIRouter(route_class=GuardedRoute)
    for router in (unguarded, guarded):
        router.get("/api/open")(lambda: None)
    rules = [("GET", "/api/open"), ("GET", "/api/no")]
    for one, rule, why in (
        (unguarded, rules[:1], "no rule of access applies"),
        (guarded, [], "lacks"),
        (guarded, rules, "without a route"),
    ):
        access = dict.fromkeys(rule, Access.KNOWN)
        with pytest.raises(ValueError, match=why):
            make_app(Listener(title="one", routers=[one], access=access, admit=lambda _: None))
    served = {route.path for route in small_gateway.client.app.routes}  # type: ignore[attr-defined]
    assert served == {path for _, path in ACCESS}


# ---- Every route of every listener, called at each of them by everybody: the table of the listener
# holds.


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


def listener_matrix_table_of(app: Any) -> Table:
    """Who may call what."""
    found: Table = app.state.access
    return found


def listener_matrix_called(app: Any, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of a call without a body, of things that do not exist."""
    place = path.replace("{project}", "alpha").replace("{", "").replace("}", "")
    client = TestClient(app, base_url=AT, raise_server_exceptions=False, follow_redirects=False)
    return client.request(method, place, headers=headers).status_code


def test_a_listener_serves_only_its_own_routes(apps: dict[str, Any]) -> None:
    every = {one for app in apps.values() for one in listener_matrix_table_of(app)}
    assert len(every) > 100
    for name, app in apps.items():
        for method, path in every - listener_matrix_table_of(app).keys():
            assert listener_matrix_called(app, method, path, {}) in {401, 404, 405}, (name, method, path)
    assert not listener_matrix_table_of(apps["prompts"]).keys() & {
        ("POST", "/v1/chat/completions"),
        ("GET", "/chat"),
    }


def test_every_route_of_a_listener_admits_the_roles_in_its_table(
    small_gateway: SmallGateway, apps: dict[str, Any]
) -> None:
    for role in reversed(Role):
        small_gateway.person(role.value, "alpha", role)
    small_gateway.person("stranger", "beta", Role.OWNER)
    members = [(role, small_gateway.bearer(role.value) | PROJECT) for role in Role]
    outsiders = [small_gateway.bearer("stranger") | PROJECT, small_gateway.token("beta") | PROJECT]
    for name in ("gateway", "chat", "prompts", "text"):
        for (method, path), access in listener_matrix_table_of(apps[name]).items():
            if access is Access.ANYBODY or (method, path) == ENDS_ITS_CALLER or path.endswith("/events"):
                continue
            what = (name, method, path)
            assert listener_matrix_called(apps[name], method, path, {}) == 401, what
            if access is Access.KNOWN:
                continue
            for headers in outsiders:
                assert listener_matrix_called(apps[name], method, path, headers) == (
                    404 if name == "gateway" else 403
                ), what
            for role, headers in members:
                found = listener_matrix_called(apps[name], method, path, headers)
                assert (found not in {401, 403}) is role.includes(Role(access)), (*what, role, found)


def test_every_route_of_the_page_needs_the_cookie(apps: dict[str, Any]) -> None:
    app = apps["page"]
    mine = TestClient(app, base_url=AT, raise_server_exceptions=False, follow_redirects=False)
    assert mine.get("/", params={"secret": app.state.door.secret}).status_code == 303
    for method, path in listener_matrix_table_of(app):
        assert listener_matrix_called(app, method, path, {}) == 401, (method, path)
        if path != WITHOUT_END:
            assert (
                mine.request(
                    method, path.format(name="x", job="x", version=1, action="pause", file="main.js")
                ).status_code
                != 401
            )


def test_a_role_that_does_not_suffice_is_reported_before_the_body_is_read(
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


async def test_methods_and_paths_of_callers_add_no_series(apps: dict[str, Any]) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message: Any) -> None:
        pass

    for app in apps.values():
        REQUESTS.clear()
        places = [path for _, path in listener_matrix_table_of(app)]
        for number in range(3000):
            path = places[number % len(places)] if number % 2 else f"/{'p' * 500}{number}"
            scope: dict[str, Any] = {
                "type": "http",
                "method": f"M{number}{'X' * 500}",
                "path": path,
                "query_string": b"",
            }
            scope |= {"headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "state": {}}
            await app(scope, receive, send)
        assert len(exposition("gateway")) < 64 * 1024
        assert {one.labels["method"] for family in REQUESTS.collect() for one in family.samples} == {"other"}


# ---- The OpenAPI document names every call, whom it admits, and the one shape of errors.


def test_every_route_is_described_with_its_possible_answers(small_gateway: SmallGateway) -> None:
    document = small_gateway.get("/api/openapi.json", {}).json()
    described = {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert described.keys() == ACCESS.keys()
    for place, access in ACCESS.items():
        assert ("security" in described[place]) is (access is not Access.ANYBODY), place
        path = {one["name"] for one in described[place]["parameters"] if one["in"] == "path"}
        assert path == set(re.findall(r"{(\w+)}", place[1])), place
        assert {"404", "409", "422", "429", "503"} <= described[place]["responses"].keys(), place
    references = {part.split('"')[1] for part in json.dumps(document).split('"$ref": ')[1:]}
    for reference in references:
        found = document
        for key in reference.removeprefix("#/").split("/"):
            found = found[key]
    assert "HTTPValidationError" not in json.dumps(document)


def test_the_description_links_an_answer_with_an_id_to_the_calls_that_take_it(
    small_gateway: SmallGateway,
) -> None:
    paths = small_gateway.get("/api/openapi.json", {}).json()["paths"]
    places = {one["operationId"]: path for path, operations in paths.items() for one in operations.values()}
    links = [
        link
        for operations in paths.values()
        for operation in operations.values()
        for answer in operation["responses"].values()
        for link in answer.get("links", {}).values()
    ]
    assert len(links) == 21
    for link in links:
        assert link["parameters"].keys() <= set(re.findall(r"{(\w+)}", places[link["operationId"]]))


def test_a_refusal_has_the_described_shape(small_gateway: SmallGateway) -> None:
    schema = small_gateway.get("/api/openapi.json", {}).json()["components"]["schemas"]["Error"]
    refused = small_gateway.client.post("/api/auth/token", data={"grant_type": "none"}).json()
    assert refused.keys() == schema["properties"].keys() == set(schema["required"])


def test_only_the_page_and_its_files_are_served(small_gateway: SmallGateway) -> None:
    page = small_gateway.get("/", {})
    assert page.headers["content-type"].startswith("text/html")
    for name, kind in (("console.js", "text/javascript"), ("console.css", "text/css")):
        assert name in page.text
        assert small_gateway.get(f"/console/{name}", {}).headers["content-type"].startswith(kind)
    for name in ("nothing", "../console_routes.py", "..%2fconsole_routes.py", "%2e%2e"):
        assert small_gateway.get(f"/console/{name}", {}).status_code == 404


# ---- What the OpenAPI document says of bodies: each answer has a shape, each example is answered as
# success.


SHIPPED: Final = Path(__file__).parents[3] / "penstock" / "recipes" / "service" / "rlhf.toml"
FILES: Final = {
    *("text/html", "text/css", "text/javascript", "image/svg+xml", "text/event-stream"),
    *("application/x-ndjson", "application/octet-stream"),
}
"""What an answer may be that is no JSON: a page or its parts, a stream, a file."""
DRY_RUN: Final = "POST /api/projects/{project}/estimates"
RATE: Final = "POST /api/link/ratings"
SENT: Final = {
    "POST /api/auth/token": 200,
    "POST /api/projects/{project}/invitations": 201,
    "POST /api/projects/{project}/tokens": 201,
    "PUT /api/projects/{project}/members/{user}": 204,
    "POST /api/policies/feedback/{agent_id}": 200,
    "POST /api/projects/{project}/agents/{agent_id}/feedback": 201,
    "POST /api/projects/{project}/agents/{agent_id}/pairs": 201,
    "POST /api/projects/{project}/agents/{agent_id}/late-rewards": 201,
    "POST /api/projects/{project}/agents/{agent_id}/conversations": 201,
    "POST /api/projects/{project}/agents/{agent_id}/links": 201,
    RATE: 200,
    "POST /api/projects/{project}/jobs": 201,
    DRY_RUN: 200,
    "POST /api/policies/train_policy/{agent_id}": 202,
}
"""The calls that have an example, and how each is answered."""


@pytest.fixture
def described_bodies_gateway(tmp_path: Path) -> SmallGateway:
    """One with routes of policies and goals, and templates of both kinds; `ada` owns alpha, with `bob`."""
    templates = write_templates(tmp_path / "templates")
    shutil.copy(SHIPPED, templates)
    runner = LocalRunner(tmp_path / "jobs", templates)
    url, registry = (f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("accounts", "registry"))
    made = SmallGateway.at(url, registry, tmp_path, runner=runner, services=[policies(), goals()])

    def add(session: Any, now: Any) -> str:
        hashed = passwords.hash_password(PASSWORD, name="ada")
        return users.add(session, now, name="ada", password=hashed, by="test").id

    made.people["ada"] = made.accounts.run(add)
    made.person("ada", "alpha", Role.OWNER)
    made.person("bob", "alpha", Role.EDITOR)
    return made


@pytest.fixture
def document(described_bodies_gateway: SmallGateway) -> dict[str, Any]:
    """The document of that gateway."""
    return dict(described_bodies_gateway.get("/api/openapi.json", {}).json())


def described(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and operation of every call."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema itself, where it is a reference."""
    if "$ref" not in schema:
        return schema
    return dict(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])


def test_every_answer_with_a_body_has_a_shape(document: dict[str, Any]) -> None:
    seen = 0
    for method, path, operation in described(document):
        for status, answer in operation["responses"].items():
            if not status.startswith("2"):
                continue
            content = answer.get("content", {})
            assert bool(content) is (status != "204"), (method, path, status)
            for kind, told in content.items():
                schema = resolved(document, told["schema"])
                if kind != "application/json":
                    assert (kind in FILES, schema["type"]) == (True, "string"), (method, path)
                    continue
                for one in schema.get("anyOf", [schema.get("items", schema)]):
                    shape = resolved(document, one)
                    assert shape["properties"], (method, path)
                    assert shape["additionalProperties"] is False, (method, path)
                    seen += 1
    assert seen > 40


def test_an_answer_is_sent_unchanged(
    described_bodies_gateway: SmallGateway, document: dict[str, Any]
) -> None:
    text = send(described_bodies_gateway, document, "POST /api/projects/{project}/jobs").text
    known = re.sub(r'"(id|by|created)":"[^"]+"', r'"\1":"…"', text)
    assert known == (
        '{"id":"…","project":"alpha","agent":"my_agent","template":"quick",'
        '"numbers":{"maxSteps":50,"learningRate":0.0003},"by":"…","state":"queued","cause":"",'
        '"cancelled_by":null,"result":null,"created":"…","began":null,"ended":null}'
    )


def test_every_example_is_answered_as_success(
    described_bodies_gateway: SmallGateway, document: dict[str, Any]
) -> None:
    assert {f"{method} {path}" for method, path, _ in examples_of(document)} == SENT.keys()
    give_ratings(described_bodies_gateway, "trained")
    link = ""
    for call in [one for one in SENT if one not in {DRY_RUN, RATE}]:
        reply = send(described_bodies_gateway, document, call, link)
        if call.endswith("/links"):
            link = reply.json()["link"]
    send(described_bodies_gateway, document, RATE, link)


@pytest.mark.slow
def test_the_example_of_a_dry_run_is_answered_as_success(
    described_bodies_gateway: SmallGateway, document: dict[str, Any]
) -> None:
    assert send(described_bodies_gateway, document, DRY_RUN).json()["memory_bytes"] > 0


def give_ratings(described_bodies_gateway: SmallGateway, agent: str) -> None:
    """As many as a training needs."""
    for number in range(12):
        body = {"prompt": f"question {number}", "response": "yes", "score": 0.5}
        path = f"/api/policies/feedback/{agent}"
        assert (
            described_bodies_gateway.client.post(
                path, json=body, headers=described_bodies_gateway.token("alpha")
            ).status_code
            == 200
        )


def send(described_bodies_gateway: SmallGateway, document: dict[str, Any], call: str, link: str = "") -> Any:
    """The answer to the example of a call, which tells of success. link: secret of one."""
    ((kind, body),) = [found for method, path, found in examples_of(document) if f"{method} {path}" == call]
    method, _, path = call.partition(" ")
    agent = "trained" if "train_policy" in path else "my_agent"
    place = path.format(project="alpha", agent_id=agent, user=described_bodies_gateway.people["bob"])
    headers = described_bodies_gateway.bearer("ada") | {
        "Prefer": "wait=0",
        "Penstock-Link": link,
        "Content-Type": kind,
    }
    content = {"data": body} if "form" in kind else {"content": as_text(body)}
    reply = described_bodies_gateway.client.request(method, place, headers=headers, **content)
    assert reply.status_code == SENT[call], (call, reply.text)
    return reply


def examples_of(document: dict[str, Any]) -> Iterator[tuple[str, str, tuple[str, Any]]]:
    """Method, path, and the example of a body with its type, of every call that has one."""
    for method, path, operation in described(document):
        for kind, told in operation.get("requestBody", {}).get("content", {}).items():
            schema = resolved(document, told.get("schema", {}))
            for one in [told["example"]] if "example" in told else schema.get("examples", []):
                yield method, path, (kind, one)


def as_text(body: Any) -> str:
    """A body as it is sent; lines are text already."""
    return body if isinstance(body, str) else json.dumps(body)
