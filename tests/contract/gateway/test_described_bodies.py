"""What the OpenAPI document says of bodies: each answer has a shape, each example is answered as success."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.gateway.accounts import users
from penstock.gateway.accounts import users as passwords
from penstock.gateway.store.tables import Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.workloads.goals.http.goals_service import service as goals
from penstock.workloads.rlhf.policy_service import service as policies
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway

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
def gateway(tmp_path: Path) -> SmallGateway:
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
def document(gateway: SmallGateway) -> dict[str, Any]:
    """The document of that gateway."""
    return dict(gateway.get("/api/openapi.json", {}).json())


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


def test_an_answer_is_sent_as_it_was_made(gateway: SmallGateway, document: dict[str, Any]) -> None:
    text = send(gateway, document, "POST /api/projects/{project}/jobs").text
    known = re.sub(r'"(id|by|created)":"[^"]+"', r'"\1":"…"', text)
    assert known == (
        '{"id":"…","project":"alpha","agent":"my_agent","template":"quick",'
        '"numbers":{"maxSteps":50,"learningRate":0.0003},"by":"…","state":"queued","cause":"",'
        '"cancelled_by":null,"result":null,"created":"…","began":null,"ended":null}'
    )


def test_every_example_is_answered_as_success(gateway: SmallGateway, document: dict[str, Any]) -> None:
    assert {f"{method} {path}" for method, path, _ in examples_of(document)} == SENT.keys()
    give_ratings(gateway, "trained")
    link = ""
    for call in [one for one in SENT if one not in {DRY_RUN, RATE}]:
        reply = send(gateway, document, call, link)
        if call.endswith("/links"):
            link = reply.json()["link"]
    send(gateway, document, RATE, link)


@pytest.mark.slow
def test_the_example_of_a_dry_run_is_answered_as_success(
    gateway: SmallGateway, document: dict[str, Any]
) -> None:
    assert send(gateway, document, DRY_RUN).json()["memory_bytes"] > 0


def give_ratings(gateway: SmallGateway, agent: str) -> None:
    """As many as a training needs."""
    for number in range(12):
        body = {"prompt": f"question {number}", "response": "yes", "score": 0.5}
        path = f"/api/policies/feedback/{agent}"
        assert gateway.client.post(path, json=body, headers=gateway.token("alpha")).status_code == 200


def send(gateway: SmallGateway, document: dict[str, Any], call: str, link: str = "") -> Any:
    """The answer to the example of a call, which tells of success. link: secret of one."""
    ((kind, body),) = [found for method, path, found in examples_of(document) if f"{method} {path}" == call]
    method, _, path = call.partition(" ")
    agent = "trained" if "train_policy" in path else "my_agent"
    place = path.format(project="alpha", agent_id=agent, user=gateway.people["bob"])
    headers = gateway.bearer("ada") | {"Prefer": "wait=0", "Penstock-Link": link, "Content-Type": kind}
    content = {"data": body} if "form" in kind else {"content": as_text(body)}
    reply = gateway.client.request(method, place, headers=headers, **content)
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
