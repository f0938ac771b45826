import asyncio
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import func, insert, select

from penstock.gateway.accounts import sessions, users
from penstock.gateway.accounts.accounts import delete_expired
from penstock.gateway.accounts.audit import Quotas
from penstock.gateway.store.tables import (
    ApiTokenRow,
    ConversationRow,
    FeedbackLinkRow,
    InvitationRow,
    RefreshRow,
    Role,
    SessionRow,
)
from penstock.protocol.limits import MIB
from tests.support.gateway.small_gateway import SmallGateway

# ---- What a project may have stored is bounded, exactly, however many write at the same time.


SMALL: Final = Quotas(ratings=5, feedback_mib=1, links=2, invitations=2, tokens=2, conversations=5)
AGENT: Final = "/api/projects/alpha/agents/my_agent"
RATING: Final = {"prompt": "2 + 2?", "response": "4", "score": 0.9}
LINK: Final = {"items": [{"prompt": "a", "response": "b"}]}
WRITERS: Final = 32


@pytest.fixture
def gateways(database_url: str, tmp_path: Path) -> list[SmallGateway]:
    """Two of one installation."""
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    made = [
        SmallGateway.at(database_url, registry, tmp_path, quotas=SMALL, is_another=other)
        for other in (False, True)
    ]
    made[0].person("ada", "alpha", Role.OWNER)
    made[0].person("bob", "beta", Role.OWNER)
    return made


@pytest.fixture
def gateway(gateways: list[SmallGateway]) -> SmallGateway:
    """One of them."""
    return gateways[0]


@pytest.fixture
def ada(gateway: SmallGateway) -> dict[str, str]:
    """The header of an owner of `alpha`."""
    return gateway.bearer("ada")


def give(gateway: SmallGateway, headers: dict[str, str], key: str = "", **change: Any) -> Any:
    """The answer to a rating."""
    said = headers | ({"Idempotency-Key": key} if key else {})
    return gateway.client.post("/api/policies/feedback/my_agent", json=RATING | change, headers=said)


def is_quota(reply: Any, name: str) -> bool:
    """Whether an answer says that a quota is reached, which, and what to do."""
    said = reply.json()
    assert reply.status_code == 409, reply.text
    assert f"--quota {name}=NUMBER" in said["detail"]
    return bool(said["error"] == "quota" and f"(quota {name}: {getattr(SMALL, name)})" in said["detail"])


def rows(gateway: SmallGateway, kind: Any) -> int:
    """How many rows of a table there are."""
    return gateway.accounts.look(lambda session: session.scalar(select(func.count()).select_from(kind)) or 0)


def test_the_number_of_ratings_is_limited(gateway: SmallGateway, ada: dict[str, str]) -> None:
    first = give(gateway, ada, key="k-0")
    for number in range(1, 5):
        assert give(gateway, ada, key=f"k-{number}").status_code == 200
    assert is_quota(give(gateway, ada, key="k-5"), "ratings")
    assert is_quota(gateway.client.post(f"{AGENT}/pairs", json=PAIR, headers=ada), "ratings")
    assert give(gateway, ada, key="k-0").json() == first.json()
    assert give(gateway, gateway.bearer("bob")).status_code == 200
    assert gateway.client.delete("/api/me/feedback", headers=ada).json()["deleted"] == 5
    assert [give(gateway, ada, key=f"k-{number}").status_code for number in range(5)] == [200] * 5
    assert is_quota(give(gateway, ada, key="k-6"), "ratings")


def test_the_text_of_ratings_is_limited(gateway: SmallGateway, ada: dict[str, str]) -> None:
    third = "é" * (MIB // 6)
    assert give(gateway, ada, notes=third, response=third).status_code == 200
    assert is_quota(give(gateway, ada, prompt=third), "feedback_mib")
    line = f'{{"prompt": "a", "response": "{third[:1000]}", "score": 0.5}}\n'
    imports = f"{AGENT}/feedback"
    big = gateway.client.post(imports, content=(line * 200).encode(), headers=ada)
    assert is_quota(big, "ratings")
    assert "feedback import" not in gateway.actions()
    assert gateway.client.post(imports, content=line.encode(), headers=ada).status_code == 201
    assert len(gateway.registry.ratings()) == 2


def test_ratings_by_a_link_count_towards_the_quota(gateway: SmallGateway, ada: dict[str, str]) -> None:
    link = gateway.client.post(f"{AGENT}/links", json=LINK, headers=ada).json()["link"]
    for _ in range(5):
        assert give(gateway, ada).status_code == 200
    said = {"Penstock-Link": link}
    late = gateway.client.post("/api/link/ratings", json={"item": 0, "score": 1.0}, headers=said)
    assert is_quota(late, "ratings")


@pytest.mark.parametrize(
    ("path", "body", "name", "kind"),
    [
        (f"{AGENT}/links", LINK, "links", FeedbackLinkRow),
        ("/api/projects/alpha/tokens", {"name": "ci"}, "tokens", ApiTokenRow),
        ("/api/projects/alpha/invitations", {"role": "viewer"}, "invitations", InvitationRow),
    ],
)
def test_tokens_links_and_invitations_are_bounded(
    gateways: list[SmallGateway], ada: dict[str, str], path: str, body: Any, name: str, kind: Any
) -> None:
    before = len(gateways[0].actions())
    found = at_once(gateways, lambda one: one.client.post(path, json=body, headers=ada))
    assert {one.status_code for one in found} == {201, 409}
    assert sum(one.status_code == 201 for one in found) == rows(gateways[0], kind) == 2
    assert all(is_quota(one, name) for one in found if one.status_code == 409)
    assert len(gateways[0].actions()) == before + 2


def test_ended_links_and_tokens_make_room(gateway: SmallGateway, ada: dict[str, str]) -> None:
    tokens, links = "/api/projects/alpha/tokens", f"{AGENT}/links"
    made = [gateway.client.post(tokens, json={"name": "ci"}, headers=ada).json()["id"] for _ in range(2)]
    assert gateway.client.delete(f"{tokens}/{made[0]}", headers=ada).status_code == 204
    assert gateway.client.post(tokens, json={"name": "ci"}, headers=ada).status_code == 201
    made = [gateway.client.post(links, json=LINK, headers=ada).json()["id"] for _ in range(2)]
    assert gateway.client.delete(f"/api/projects/alpha/links/{made[0]}", headers=ada).status_code == 204
    assert is_quota(gateway.client.post(links, json=LINK, headers=ada), "links")
    gateway.clock.pass_time(days=1)
    assert gateway.accounts.run(delete_expired) == 1
    assert gateway.client.post(links, json=LINK, headers=gateway.bearer("ada")).status_code == 201


def test_the_number_of_conversations_is_limited(gateways: list[SmallGateway], ada: dict[str, str]) -> None:
    gateway, path = gateways[0], f"{AGENT}/conversations"

    def tell(*names: str) -> Any:
        return gateway.client.post(path, json={"version": 1, "conversations": names}, headers=ada)

    assert tell("a", "b", "c").json() == {"stored": 3}
    assert is_quota(tell("c", "d", "e", "f"), "conversations")
    assert tell("a", "b", "c", "d", "e").json() == {"stored": 2}
    assert tell("a", "e").json() == {"stored": 0}
    assert is_quota(tell("f"), "conversations")
    assert rows(gateway, ConversationRow) == 5


def test_many_writers_at_two_gateways_reach_a_quota_and_do_not_pass_it(
    gateways: list[SmallGateway], ada: dict[str, str]
) -> None:
    for one in gateways:
        one.client.app.state.parts = replace(one.parts, quotas=Quotas(ratings=20))  # type: ignore[attr-defined]
    found = Counter(one.status_code for one in at_once(gateways, lambda one: give(one, ada)))
    assert found.keys() <= {200, 409, 503}  # the last where a busy machine gives no lock for long
    assert found[200] == 20
    assert len(gateways[0].registry.ratings("alpha/my_agent")) == 20
    turns = cycle(range(4))

    def either(one: SmallGateway) -> Any:
        return one.client.delete("/api/me/feedback", headers=ada) if next(turns) == 0 else give(one, ada)

    assert {one.status_code for one in at_once(gateways, either)} <= {200, 409, 503}
    left = len(gateways[0].registry.ratings("alpha/my_agent"))
    room = [give(gateways[1], ada).status_code for _ in range(21 - left)]
    assert room == [200] * (20 - left) + [409]


def test_a_new_session_replaces_a_persons_oldest(
    gateway: SmallGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    other = gateway.bearer("bob")
    signed_in = list[dict[str, str]]()
    for _ in range(3):
        gateway.clock.pass_time(seconds=1)
        signed_in.append(gateway.bearer("ada"))
    assert [gateway.get("/api/me", one).status_code for one in (*signed_in, other)] == [401, 200, 200, 200]
    assert (rows(gateway, SessionRow), rows(gateway, RefreshRow)) == (3, 3)


def test_a_person_with_very_many_old_sessions_signs_in(gateway: SmallGateway) -> None:
    def many(session: Any, now: Any) -> None:
        ada = users.known(session, "ada").id
        made = [{"id": f"s{one}", "user": ada, "expires": now, "reason": ""} for one in range(70_000)]
        session.execute(insert(SessionRow), made)

    gateway.accounts.run(many)
    assert gateway.get("/api/me", gateway.bearer("ada")).status_code == 200
    assert rows(gateway, SessionRow) == sessions.MAX_SESSIONS


def test_a_session_can_be_refreshed_a_limited_number_of_times(
    gateway: SmallGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_EXCHANGES", 3)

    def begin(session: Any, now: Any) -> sessions.Grant:
        return sessions.begin(session, now, gateway.keys, users.known(session, "ada"))

    refresh, statuses = str(gateway.accounts.run(begin).refresh), list[int]()
    for _ in range(4):
        reply = gateway.sign_in(grant_type="refresh_token", refresh_token=refresh)
        statuses.append(reply.status_code)
        refresh = reply.json().get("refresh_token", refresh)
    assert statuses == [200, 200, 401, 401]
    assert rows(gateway, RefreshRow) == 3


def at_once(gateways: list[SmallGateway], call: Callable[[SmallGateway], Any]) -> list[Any]:
    """The answers to WRITERS calls at the same time, at both gateways."""
    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(call, (gateways * WRITERS)[:WRITERS]))


PAIR: Final = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


# ---- What a member handed out ends with what they may do; what has expired is deleted.


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


def test_tokens_of_a_removed_member_stop_working(
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


def test_a_member_with_a_lower_role_keeps_no_tokens_above_it(
    small_gateway: SmallGateway, owners: tuple[dict[str, str], dict[str, str]]
) -> None:
    ada, bob = owners
    editor, viewer = token_of(small_gateway, bob, "editor"), token_of(small_gateway, bob, "viewer")
    member = f"/api/projects/alpha/members/{small_gateway.people['bob']}"
    assert small_gateway.client.put(member, json={"role": "viewer"}, headers=ada).status_code == 204
    assert (status(small_gateway, editor), status(small_gateway, viewer)) == (401, 200)


def test_what_a_disabled_person_issued_is_revoked(
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
def test_a_removed_member_issues_nothing_in_an_open_request(
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


def test_expired_rows_are_deleted_and_valid_rows_stay(small_gateway: SmallGateway) -> None:
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
