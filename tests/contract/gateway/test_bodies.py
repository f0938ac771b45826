# ruff: noqa: S106 - passwords that only these tests use
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel, ValidationError

import penstock.gateway.application
import penstock.launch.ui.application
import penstock.workloads.chat.http.chat_bodies
import penstock.workloads.goals.http.goals_service
from penstock.config.workload import find, installed, load
from penstock.gateway.accounts import audit, users
from penstock.gateway.accounts import users as passwords
from penstock.gateway.frame.requests import Body
from penstock.gateway.frame.route_access import ACCESS, PROJECT_HEADER, Access, Table
from penstock.gateway.jobs.job_records import CannotSteer, NoAnswer, Order
from penstock.gateway.store.tables import Base, Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.gateway.run_steering import RunSteering
from penstock.registry.weight_files import registry_url
from penstock.workloads.language.serving.chat_forms import ChatRequest, Extension, RewardRequest
from penstock.workloads.prompts.http import api_bodies
from penstock.workloads.rlhf.policy_service import TrainingRequest
from tests.support.gateway.audited_changes import CHANGES, THEMSELVES, Change, Stand
from tests.support.gateway.job_templates import goal, write_goals, write_run, write_templates, write_tiny
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway

# ---- Input that is wrong on purpose, on each kind of database: refused by field, and nothing is stored.


NUL, HALF = "a\0b", "\\ud800"


def stored(gateway: SmallGateway) -> dict[str, int]:
    """Rows of each table."""

    def work(session: Any) -> dict[str, int]:
        return {
            name: len(session.execute(table.select()).all()) for name, table in Base.metadata.tables.items()
        }

    return gateway.accounts.look(work)


@pytest.fixture
def owner(small_gateway: SmallGateway) -> dict[str, str]:
    """The header of the owner of `alpha`."""
    small_gateway.person("ada", "alpha", Role.OWNER)
    return small_gateway.bearer("ada")


BODIES = [
    ("not JSON", '{"name": '),
    ("NaN", '{"name": "x", "days": NaN}'),
    ("another type", '{"name": 7}'),
    ("a list", "[]"),
    ("nothing", ""),
    ("NUL", '{"name": "a\\u0000b"}'),
    ("half a pair", f'{{"name": "{HALF}"}}'),
    ("too long", f'{{"name": "{"x" * 65}"}}'),
    ("an unknown field", '{"name": "x", "project": "beta"}'),
    ("an owner's", '{"name": "x", "role": "owner"}'),
    ("no role", '{"name": "x", "role": "root"}'),
    ("deep", "[" * 20_000 + "]" * 20_000),
    ("a huge number", '{"name": "x", "days": 1e999}'),
    ("digits", '{"name": "x", "days": ' + "9" * 5000 + "}"),
]


def test_bodies_that_are_wrong_are_refused_by_field(
    small_gateway: SmallGateway, owner: dict[str, str]
) -> None:
    before = stored(small_gateway)
    headers = owner | {"Content-Type": "application/json"}
    for what, body in BODIES:
        reply = small_gateway.client.post("/api/projects/alpha/tokens", content=body, headers=headers)
        assert reply.status_code in {400, 422}, (what, reply.text)
        assert reply.json().keys() == {"error", "detail", "field"}, what
    assert stored(small_gateway) == before


def test_the_name_of_a_field_is_repeated_cut_short(
    small_gateway: SmallGateway, owner: dict[str, str]
) -> None:
    long = '{"prompt": "a", "response": "b", "score": 0.5, "%s": 1}' % ("n" * 500_000)
    for path in ("/api/policies/feedback/my_agent", "/api/projects/alpha/agents/my_agent/feedback"):
        headers = owner | {"Content-Type": "application/json"}
        reply = small_gateway.client.post(path, content=long, headers=headers)
        assert (reply.status_code, set(reply.json()["field"])) == (422, {"n"}), reply.text[:200]
        assert len(reply.text) < 1000


@pytest.mark.parametrize(
    "path",
    ["audit?before=", "agents/a/feedback?after=", "agents/a/late-rewards?after="],
    ids=["audit", "ratings", "late"],
)
def test_a_number_too_large_for_a_database_is_refused(
    small_gateway: SmallGateway, owner: dict[str, str], path: str
) -> None:
    at = f"/api/projects/alpha/{path}"
    assert small_gateway.get(f"{at}{2**63 - 1}", owner).status_code == 200
    for number in (2**63, 10**30):
        reply = small_gateway.get(f"{at}{number}", owner)
        assert (reply.status_code, reply.json()["field"]) == (422, path.partition("?")[2].rstrip("="))


@pytest.mark.parametrize("number", ['"8"', "true", "null", "[8]", '{"a": 8}'])
def test_a_number_of_a_training_is_a_number(
    small_gateway: SmallGateway, owner: dict[str, str], number: str
) -> None:
    reply = small_gateway.client.post(
        "/api/projects/alpha/jobs",
        content=f'{{"agent": "a", "template": "t", "numbers": {{"maxSteps": {number}}}}}',
        headers=owner | {"Content-Type": "application/json"},
    )
    assert (reply.status_code, reply.json()["field"]) == (422, "numbers.maxSteps"), reply.text


@pytest.mark.parametrize("name", [NUL, "a b", "ä", "x" * 200, "'; DROP TABLE users; --", ""])
def test_invalid_names_find_no_account(small_gateway: SmallGateway, name: str) -> None:
    reply = small_gateway.sign_in(grant_type="password", username=name, password="x")
    assert reply.status_code in {401, 422}


def test_ids_from_a_path_are_only_looked_up(small_gateway: SmallGateway, owner: dict[str, str]) -> None:
    before = stored(small_gateway)
    for odd in ("a%00b", "%ff", "..%2f..", "' OR 1=1 --", "x" * 3000, "%F0%9F%92%A9"):
        for method, path in (
            ("GET", f"/api/projects/{odd}"),
            ("DELETE", f"/api/projects/alpha/tokens/{odd}"),
            ("DELETE", f"/api/projects/alpha/members/{odd}"),
        ):
            reply = small_gateway.client.request(method, path, headers=owner)
            assert reply.status_code == 404, (path, reply.text)
    assert stored(small_gateway) == before


def test_invalid_credentials_are_refused(small_gateway: SmallGateway) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    for header in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        "Bearer psr_" + "x" * 43,
        "Bearer pst_" + "x" * 43,
        "Basic",
        "Basic !",
        "Basic YWRhOg==",
        "Digest x",
        "Bearer " + "a." * 3000,
        "Bearer \u00e4.b.c",
    ):
        reply = small_gateway.client.get("/api/me", headers=[(b"authorization", header.encode("latin-1"))])
        assert reply.status_code == 401, header
        assert "Basic" in reply.headers["www-authenticate"]


def test_other_grants_are_refused(small_gateway: SmallGateway) -> None:
    reply = small_gateway.sign_in(grant_type="implicit")
    assert (reply.status_code, reply.json()["error"]) == (400, "unsupported_grant_type")
    secret = small_gateway.sign_in(grant_type="client_credentials", client_secret="x\0")
    assert secret.status_code == 401


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_json_without_its_content_type_is_refused_with_the_remedy(
    small_gateway: SmallGateway, owner: dict[str, str], kind: str
) -> None:
    content, path = b'{"prompt": "a", "response": "b", "score": 0.5}', "/api/policies/feedback/a"
    headers = owner | ({"Content-Type": kind} if kind else {})
    refused = small_gateway.client.post(path, content=content, headers=headers)
    assert refused.status_code == 422
    assert "send `Content-Type: application/json`" in refused.json()["detail"]
    taken = small_gateway.client.post(
        path, content=content, headers=owner | {"Content-Type": "application/json"}
    )
    assert taken.status_code == 200


# ---- A number in a body is a number: neither true, nor a text of digits, whatever the call.


KNOWN_ELSEWHERE: Final = {(TrainingRequest, "maxSteps"), (TrainingRequest, "learningRate")}
"""Programs that know the original service may have sent them as texts."""
LOADED: Final = (
    penstock.gateway.application,
    penstock.launch.ui.application,
    penstock.workloads.chat.http.chat_bodies,
    penstock.workloads.goals.http.goals_service,
)
"""What defines bodies."""


def kinds(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Bodies of that base."""
    for one in base.__subclasses__():
        yield one
        yield from kinds(one)


def numbers() -> Iterator[tuple[type[BaseModel], str]]:
    """Every field of a body that is a number, and its body."""
    prompts = [one for name, one in vars(api_bodies).items() if name.endswith("Request")]
    for body in {
        *kinds(Body), *prompts, ChatRequest, Extension, RewardRequest,
    }:  # fmt: skip
        for name, schema in body.model_json_schema(by_alias=False).get("properties", {}).items():
            said = {one.get("type") for one in (schema, *schema.get("anyOf", ()))}
            if said & {"integer", "number"}:
                yield body, name


def is_refused(body: type[BaseModel], name: str, value: Any) -> bool:
    """Whether a value is, by the name of its field."""
    try:
        body.model_validate({name: value})
    except ValidationError as error:
        return any(one["loc"][0] == name for one in error.errors())
    return False


def test_booleans_and_digits_in_quotes_are_no_numbers() -> None:
    found = set(numbers())
    assert len(found) >= 30
    assert KNOWN_ELSEWHERE <= found
    assert not {(body.__name__, name) for body, name in found if not is_refused(body, name, True)}
    assert {one for one in found if not is_refused(*one, "1")} == KNOWN_ELSEWHERE


@pytest.mark.parametrize("version", [True, False, "7", [7], 7.5, 0])
def test_a_version_that_is_no_number_is_refused_and_nothing_kept(
    small_gateway: SmallGateway, version: Any
) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    ada, path = small_gateway.bearer("ada"), "/api/policies/feedback/my_agent"
    body = {"prompt": "2 + 2?", "response": "4", "score": 1}
    reply = small_gateway.client.post(path, json=body | {"version": version}, headers=ada)
    assert (reply.status_code, reply.json()["field"]) == (422, "version"), reply.text
    assert small_gateway.registry.ratings() == ()
    whole = small_gateway.client.post(path, json=body | {"version": 7.0}, headers=ada)
    assert whole.status_code == 200, whole.text
    assert small_gateway.registry.ratings()[0].rating.version == 7


# ---- Every call that changes something leaves one row in the audit, and none where it is refused.


SERVICES: Final = [load(one.http)() for one in map(find, installed()) if one.http]
RULES: Final[Table] = {**ACCESS, **{place: who for one in SERVICES for place, who in one.access.items()}}
CHANGING: Final = {"POST", "PUT", "PATCH", "DELETE"}
CALLS: Final = sorted(f"{method} {path}" for method, path in RULES if method in CHANGING)
_RECORD: Final = "what it stores is its own record: who gave it, opaquely, and when; the registry keeps both"
WITHOUT: Final = {
    "POST /api/policies/feedback/{agent_id}": _RECORD,
    "POST /api/projects/{project}/agents/{agent_id}/pairs": _RECORD,
    "POST /api/projects/{project}/agents/{agent_id}/late-rewards": _RECORD,
    "POST /api/link/ratings": _RECORD,
    "POST /api/projects/{project}/estimates": "a dry run leaves nothing",
    "POST /api/auth/oidc": "it stores nothing: the browser takes along what it must bring back",
    "POST /api/auth/oidc/session": "a refresh token is exchanged; the session has its row since it began",
}
"""The calls that leave no row, and why."""


class Answering(RunSteering):
    """Steers the versions of a run that is over, and answers orders as a broker of one that goes on."""

    def order(self, job: str, order: Order) -> Mapping[str, Any]:
        """What a run answers that goes on; a checkpoint is still being made."""
        if order.name == "lost":
            raise NoAnswer("the broker does not answer")
        if order.name == "refused":
            raise CannotSteer("the broker refuses it")
        return {"desired": "PAUSED", "revision": 1}


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """One whose owner has a password; `bob` is an editor."""
    templates = write_tiny(write_templates(tmp_path / "templates"))
    runner = LocalRunner(tmp_path / "jobs", templates)
    url, registry = (f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("accounts", "registry"))
    gateway = SmallGateway.at(url, registry, tmp_path, runner=runner, services=SERVICES)
    run = write_run(tmp_path / "run", "alpha/runs")
    assert gateway.parts.dispatcher is not None
    gateway.parts.dispatcher.steering = Answering(lambda _job: run, registry_url(run))

    def add(session: Any, now: Any) -> str:
        hashed = passwords.hash_password(PASSWORD, name="ada")
        return users.add(session, now, name="ada", password=hashed, by="test").id

    gateway.people["ada"] = gateway.accounts.run(add)
    gateway.person("ada", "alpha", Role.OWNER)
    gateway.person("bob", "alpha", Role.EDITOR)
    injector = tmp_path / "injectors" / "alpha" / "host"
    injector.mkdir(parents=True)
    write_goals(injector, goal("waits"), goal("done", injected=True))
    return Stand(gateway, tmp_path, gateway.bearer("ada"))


def test_the_calls_are_those_of_the_application(stand: Stand) -> None:
    document = stand.gateway.get("/api/openapi.json", {}).json()
    described = {
        f"{method.upper()} {path}" for path, operations in document["paths"].items() for method in operations
    }
    table: Table = stand.gateway.client.app.state.access  # type: ignore[attr-defined]
    assert table == RULES
    assert {one for one in described if one.partition(" ")[0] in CHANGING} == set(CALLS)
    assert CHANGES.keys() | WITHOUT.keys() <= set(CALLS)
    assert not CHANGES.keys() & WITHOUT.keys()


@pytest.mark.parametrize("call", [one for one in CALLS if one not in WITHOUT])
def test_a_change_leaves_one_row_and_a_refusal_none(stand: Stand, call: str) -> None:
    assert call in CHANGES, f"{call}: it leaves no row: say in CHANGES how it is made, or in WITHOUT why not"
    change, method = CHANGES[call](stand), call.partition(" ")[0]
    refused = [*strangers(stand, call, change), *change.refused]
    before = stand.rows()
    for path, said in refused:
        reply = stand.send(method, path, **said)
        assert 400 <= reply.status_code < 500, (path, said, reply.text)
        assert len(stand.rows()) == len(before), (path, said, reply.text)
    reply = stand.send(method, change.path, **change.said)
    assert 200 <= reply.status_code < 300, reply.text
    new = stand.rows()[len(before) :]
    (row,) = [one for one in new if one.action not in change.beside]
    assert [one.action for one in new if one is not row] == list(change.beside)
    assert (row.action, row.project) == (change.action, change.project)
    assert row.subject.startswith(change.subject)
    assert row.by == (row.subject if change.by == THEMSELVES else change.by)


def strangers(stand: Stand, call: str, change: Change) -> list[tuple[str, Mapping[str, Any]]]:
    """The same call by those who may not make it, and with a field that there is none of."""
    method, _, path = call.partition(" ")
    access, said = RULES[method, path], dict(change.said)
    found: list[tuple[str, Mapping[str, Any]]] = []
    if "json" in said:
        found.append((change.path, said | {"json": said["json"] | {"unknown": 1}}))
    if access is Access.ANYBODY:
        return found
    callers = [{"Authorization": "Bearer none"}]
    if access is not Access.KNOWN:
        elsewhere = stand.gateway.token("beta") | {PROJECT_HEADER: "alpha"}
        callers += [elsewhere, stand.gateway.token("alpha", Role.VIEWER)]
    return [*found, *((change.path, said | {"headers": said.get("headers", {}) | one}) for one in callers)]


def test_an_order_that_is_polled_leaves_one_row(stand: Stand) -> None:
    job, before = stand.job(), len(stand.rows())
    for action, request in (
        *(("checkpoint", "r-1"), ("checkpoint", "r-1"), ("checkpoint", "r-2"), ("flush", "r-1")),
        *(("pause", "r-1"), ("pause", "r-1")),
    ):
        stand.made(f"{job}/control/{action}", {"requestId": request})
    assert [one.action for one in stand.rows()[before:]] == [
        *("run: checkpoint", "run: checkpoint", "run: flush"),
        *("run: pause", "run: pause"),
    ]


def test_an_action_that_may_have_happened_keeps_its_row(stand: Stand) -> None:
    job, before = stand.job(), len(stand.rows())
    lost = stand.send("POST", f"{job}/control/checkpoint", json={"name": "lost", "requestId": "r-1"})
    assert lost.status_code == 409
    again = stand.send("POST", f"{job}/control/checkpoint", json={"name": "refused", "requestId": "r-1"})
    assert again.status_code == 409
    assert [one.action for one in stand.rows()[before:]] == ["run: checkpoint"]


def test_reading_weights_leaves_a_row(stand: Stand) -> None:
    job, before = stand.job(), len(stand.rows())
    assert stand.send("GET", f"{job}/versions/7/weights").status_code == 409
    assert len(stand.rows()) == before
    assert stand.send("GET", f"{job}/versions/5/weights").status_code == 200
    assert [one.action for one in stand.rows()[before:]] == ["weights read"]


def test_a_row_is_found_by_the_id_of_a_repeated_request(small_gateway: SmallGateway) -> None:
    same = {"project": "alpha", "action": "run: flush", "subject": "job/1"}
    small_gateway.accounts.run(lambda session, now: audit.note(session, now, by="t", request="r", **same))

    def found(request: str = "r", **other: str) -> bool:
        wanted = same | other
        return small_gateway.accounts.look(lambda session: audit.is_noted(session, request=request, **wanted))

    assert found()
    for other in ({"project": "beta"}, {"action": "run: pause"}, {"subject": "job/2"}, {"request": "s"}):
        assert not found(**other)
