"""What a member handed out ends with what they may do; what has expired is deleted."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, select

from penstock.gateway.accounts import users
from penstock.gateway.accounts.accounts import delete_expired
from penstock.gateway.store.tables import FeedbackLinkRow, InvitationRow, RefreshRow, Role, SessionRow
from tests.support.gateway.small_gateway import SmallGateway

TOKENS = "/api/projects/alpha/tokens"
INVITATIONS = "/api/projects/alpha/invitations"
LINKS = "/api/projects/alpha/agents/my_agent/links"
ITEMS = [{"prompt": "a", "response": "b"}]


@pytest.fixture
def owners(small_gateway: SmallGateway) -> tuple[dict[str, str], dict[str, str]]:
    """The headers of two owners of `alpha`."""
    for name in ("ada", "bob"):
        small_gateway.person(name, "alpha", Role.OWNER)
    return small_gateway.bearer("ada"), small_gateway.bearer("bob")


def token_of(gateway: SmallGateway, headers: dict[str, str], role: str) -> dict[str, str]:
    """The header of a token that somebody makes."""
    reply = gateway.client.post(TOKENS, json={"name": "ci", "role": role}, headers=headers)
    assert reply.status_code == 201, reply.text
    return {"Authorization": f"Bearer {reply.json()['token']}"}


def link_of(gateway: SmallGateway, headers: dict[str, str], days: int = 30) -> dict[str, str]:
    """The header of a link that a person or a program makes."""
    reply = gateway.client.post(LINKS, json={"items": ITEMS, "days": days}, headers=headers)
    assert reply.status_code == 201, reply.text
    return {"Penstock-Link": reply.json()["link"]}


def counts(gateway: SmallGateway, link: dict[str, str]) -> bool:
    """Whether a link can be used."""
    return bool(gateway.get("/api/link", link).status_code == 200)


def status(gateway: SmallGateway, headers: dict[str, str]) -> int:
    """The status of a look at the project."""
    return int(gateway.get("/api/projects/alpha", headers).status_code)


def test_a_member_who_is_removed_acts_no_more_through_tokens(
    small_gateway: SmallGateway, owners: tuple[dict[str, str], dict[str, str]]
) -> None:
    ada, bob = owners
    gone, stays = token_of(small_gateway, bob, "editor"), token_of(small_gateway, ada, "editor")
    invited = small_gateway.client.post(INVITATIONS, json={"role": "owner"}, headers=bob).json()
    member = f"/api/projects/alpha/members/{small_gateway.people['bob']}"
    assert status(small_gateway, gone) == 200
    assert small_gateway.client.delete(member, headers=ada).status_code == 204
    assert status(small_gateway, gone) == 401
    assert status(small_gateway, stays) == 200
    assert status(small_gateway, bob) == 404
    small_gateway.person("eve")
    body = {"invitation": invited["invitation"]}
    joined = small_gateway.client.post("/api/auth/join", json=body, headers=small_gateway.bearer("eve"))
    assert joined.status_code == 422
    assert "token revoked" in small_gateway.actions("alpha")


def test_a_member_who_becomes_less_keeps_tokens_of_no_more(
    small_gateway: SmallGateway, owners: tuple[dict[str, str], dict[str, str]]
) -> None:
    ada, bob = owners
    editor, viewer = token_of(small_gateway, bob, "editor"), token_of(small_gateway, bob, "viewer")
    member = f"/api/projects/alpha/members/{small_gateway.people['bob']}"
    assert small_gateway.client.put(member, json={"role": "viewer"}, headers=ada).status_code == 204
    assert (status(small_gateway, editor), status(small_gateway, viewer)) == (401, 200)


def test_who_is_disabled_acts_no_more_through_what_they_handed_out(
    small_gateway: SmallGateway, owners: tuple[dict[str, str], dict[str, str]]
) -> None:
    ada, bob = owners
    gone, stays = token_of(small_gateway, bob, "editor"), token_of(small_gateway, ada, "editor")
    invited = small_gateway.client.post(INVITATIONS, json={"role": "owner"}, headers=bob).json()
    links = "/api/projects/alpha/agents/my_agent/links"
    items = [{"prompt": "a", "response": "b"}]
    link = small_gateway.client.post(links, json={"items": items}, headers=bob).json()["link"]
    small_gateway.accounts.run(
        lambda session, now: users.disable(session, now, users.known(session, "bob"), by="operator")
    )
    assert [status(small_gateway, one) for one in (bob, gone, stays)] == [401, 401, 200]
    small_gateway.person("eve")
    body = {"invitation": invited["invitation"]}
    joined = small_gateway.client.post("/api/auth/join", json=body, headers=small_gateway.bearer("eve"))
    assert joined.status_code == 422
    assert small_gateway.get("/api/link", {"Penstock-Link": link}).status_code == 404
    assert {"token revoked", "feedback link revoked"} <= set(small_gateway.actions("alpha"))


def test_links_end_with_the_token_that_made_them(
    small_gateway: SmallGateway, owners: tuple[dict[str, str], dict[str, str]]
) -> None:
    ada, _ = owners
    tokens = [
        small_gateway.client.post(TOKENS, json={"name": "ci", "days": 1}, headers=ada).json()
        for _ in range(2)
    ]
    gone, stays = (link_of(small_gateway, {"Authorization": f"Bearer {token['token']}"}) for token in tokens)
    revoke = f"{TOKENS}/{tokens[0]['id']}"
    assert small_gateway.client.delete(revoke, headers=ada).status_code == 204
    small_gateway.clock.pass_time(days=2)
    assert (counts(small_gateway, gone), counts(small_gateway, stays)) == (False, True)
    ada = small_gateway.bearer("ada")
    listed = small_gateway.get(LINKS, ada).json()["links"]
    assert sorted(one["revoked"] is None for one in listed) == [False, True]
    assert small_gateway.actions("alpha").count("feedback link revoked") == 1
    assert small_gateway.client.delete(f"{TOKENS}/{tokens[1]['id']}", headers=ada).status_code == 204
    assert not counts(small_gateway, stays)


def test_links_end_with_the_person_whose_token_made_them(
    small_gateway: SmallGateway, owners: tuple[dict[str, str], dict[str, str]]
) -> None:
    ada, bob = owners
    small_gateway.person("eve", "alpha", Role.OWNER)
    removed, disabled, stays = (
        link_of(small_gateway, token_of(small_gateway, one, "editor"))
        for one in (bob, small_gateway.bearer("eve"), ada)
    )
    member = f"/api/projects/alpha/members/{small_gateway.people['bob']}"
    assert small_gateway.client.delete(member, headers=ada).status_code == 204
    small_gateway.accounts.run(
        lambda session, now: users.disable(session, now, users.known(session, "eve"), by="operator")
    )
    found = [counts(small_gateway, one) for one in (removed, disabled, stays)]
    assert found == [False, False, True]


def sent_late(
    gateway: SmallGateway, path: str, headers: dict[str, str], body: Any, meanwhile: Callable[[], None]
) -> int:
    """The status of a request whose body comes when something has happened since its head was admitted."""
    said = {"Host": "127.0.0.1", "Content-Type": "application/json", **headers}
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in said.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    statuses = list[int]()

    async def receive() -> dict[str, Any]:
        await asyncio.to_thread(meanwhile)
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(gateway.client.app(scope, receive, send))  # type: ignore[arg-type]
    return statuses[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENS, {"name": "ci", "role": "editor"}),
        (INVITATIONS, {"role": "owner"}),
        (LINKS, {"items": ITEMS, "days": 90}),
    ],
)
@pytest.mark.parametrize(("role", "refused"), [(None, 404), (Role.VIEWER, 403)])
def test_who_is_let_in_hands_out_nothing_once_they_are_removed(
    small_gateway: SmallGateway,
    owners: tuple[dict[str, str], dict[str, str]],
    path: str,
    body: dict[str, Any],
    role: Role | None,
    refused: int,
) -> None:
    ada, bob = owners
    member = f"/api/projects/alpha/members/{small_gateway.people['bob']}"

    def withdraw() -> None:
        if role is None:
            reply = small_gateway.client.delete(member, headers=ada)
        else:
            reply = small_gateway.client.put(member, json={"role": role}, headers=ada)
        assert reply.status_code == 204, reply.text

    assert sent_late(small_gateway, path, bob, body, withdraw) == refused
    assert not {"token added", "invited", "feedback link added"} & set(small_gateway.actions())


def test_what_has_expired_is_deleted_and_what_counts_stays(small_gateway: SmallGateway) -> None:
    def counts() -> list[int]:
        kinds: list[Any] = [SessionRow, RefreshRow, InvitationRow, FeedbackLinkRow]
        return small_gateway.accounts.look(
            lambda session: [session.scalar(select(func.count()).select_from(kind)) or 0 for kind in kinds]
        )

    small_gateway.person("ada", "alpha", Role.OWNER)
    ada = small_gateway.bearer("ada")
    small_gateway.client.post(INVITATIONS, json={"role": "viewer", "days": 7}, headers=ada)
    items = [{"prompt": "a", "response": "b"}]
    links = "/api/projects/alpha/agents/my_agent/links"
    small_gateway.client.post(links, json={"items": items, "days": 7}, headers=ada)
    assert counts() == [1, 1, 1, 1]
    assert small_gateway.accounts.run(delete_expired) == 0
    small_gateway.clock.pass_time(days=9)
    assert small_gateway.accounts.run(delete_expired) == 2
    assert counts() == [1, 1, 0, 0]
    small_gateway.clock.pass_time(days=21)
    fresh = small_gateway.bearer("ada")
    audited = small_gateway.actions()
    assert small_gateway.accounts.run(delete_expired) == 2
    assert counts() == [1, 1, 0, 0]
    assert small_gateway.get("/api/me", fresh).status_code == 200
    assert small_gateway.actions() == audited


def test_a_session_that_was_ended_is_deleted_a_day_later(small_gateway: SmallGateway) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    small_gateway.client.post("/api/auth/sign-out", headers=small_gateway.bearer("ada"))
    assert small_gateway.accounts.run(delete_expired) == 0
    small_gateway.clock.pass_time(days=1)
    assert small_gateway.accounts.run(delete_expired) == 2
