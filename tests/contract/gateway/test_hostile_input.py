"""Input that is wrong on purpose, on each kind of database: refused by field, and nothing is stored."""
# ruff: noqa: S106 - passwords that only these tests use

from typing import Any

import pytest

from penstock.gateway.store.tables import Base, Role
from tests.support.gateway.small_gateway import SmallGateway

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


def test_the_name_of_a_field_is_repeated_in_part(small_gateway: SmallGateway, owner: dict[str, str]) -> None:
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
def test_a_number_that_no_database_holds_is_refused(
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
def test_names_that_are_none_find_no_account(small_gateway: SmallGateway, name: str) -> None:
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


def test_credentials_that_are_none_are_refused(small_gateway: SmallGateway) -> None:
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
def test_json_that_is_not_said_to_be_json_is_told_how(
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
