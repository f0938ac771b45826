# ruff: noqa: S106 - passwords that only these tests use
import base64
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from penstock.gateway.accounts.oidc import Newcomers, ProviderSettings
from penstock.gateway.accounts.users import MOST_OF_ADDRESS, MOST_OF_BOTH
from penstock.gateway.store.tables import AttemptRow, Role
from tests.support.gateway.identity_provider import Forge, IdentityProvider, identity_provider
from tests.support.gateway.small_gateway import ADDRESS, PASSWORD, SmallGateway

# ---- Signing in, and when it counts no more, on each kind of database.


NEW = "a better staple of horses"


@pytest.fixture
def ada(small_gateway: SmallGateway) -> SmallGateway:
    """A gateway with one person whose password is real."""
    small_gateway.accounts.add_user("ada", PASSWORD, project="alpha", role=Role.OWNER, by="test")
    return small_gateway


def granted(reply: Any) -> dict[str, Any]:
    """What a request for tokens gave."""
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def bearer(grant: dict[str, Any]) -> dict[str, str]:
    """The header of a grant."""
    return {"Authorization": f"Bearer {grant['access_token']}"}


def test_a_password_gives_tokens_and_a_wrong_one_does_not(ada: SmallGateway) -> None:
    grant = granted(ada.sign_in(grant_type="password", username="Ada", password=PASSWORD))
    assert grant["token_type"] == "bearer"  # noqa: S105 - none
    assert ada.get("/api/me", bearer(grant)).json()["projects"] == [{"project": "alpha", "role": "owner"}]
    wrong = ada.sign_in(grant_type="password", username="ada", password="wrong")
    unknown = ada.sign_in(grant_type="password", username="unknown", password="wrong")
    assert wrong.status_code == unknown.status_code == 401
    assert wrong.json() == unknown.json()


def test_a_password_whose_stored_hash_is_invalid_is_refused(ada: SmallGateway) -> None:
    ada.person("bob", "alpha")
    reply = ada.sign_in(grant_type="password", username="bob", password="-")
    wrong = ada.sign_in(grant_type="password", username="ada", password="wrong")
    assert (reply.status_code, reply.json()) == (401, wrong.json())
    body = {"current": "-", "new": NEW}
    changed = ada.client.post("/api/auth/password", json=body, headers=ada.bearer("bob"))
    assert changed.status_code == 401


def test_a_refresh_token_is_exchanged_and_a_stolen_copy_ends_the_session(ada: SmallGateway) -> None:
    first = granted(ada.sign_in(grant_type="password", username="ada", password=PASSWORD))
    second = granted(ada.sign_in(grant_type="refresh_token", refresh_token=first["refresh_token"]))
    assert second["refresh_token"] != first["refresh_token"]
    ada.clock.pass_time(seconds=11)
    stolen = ada.sign_in(grant_type="refresh_token", refresh_token=first["refresh_token"])
    assert stolen.status_code == 401
    after = ada.sign_in(grant_type="refresh_token", refresh_token=second["refresh_token"])
    assert after.status_code == 401
    assert ada.get("/api/me", bearer(second)).status_code == 401
    assert "refresh token reused" in ada.actions()


def test_two_tabs_may_present_the_same_refresh_token_at_once(ada: SmallGateway) -> None:
    first = granted(ada.sign_in(grant_type="password", username="ada", password=PASSWORD))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: ada.accounts.refresh(first["refresh_token"]), range(2)))
    ada.clock.pass_time(minutes=5)
    for tab in both:
        assert tab.refresh is not None
        granted(ada.sign_in(grant_type="refresh_token", refresh_token=tab.refresh))
    assert both[0].refresh != both[1].refresh


def test_a_password_change_ends_every_session_everywhere(ada: SmallGateway) -> None:
    here = granted(ada.sign_in(grant_type="password", username="ada", password=PASSWORD))
    there = granted(ada.sign_in(grant_type="password", username="ada", password=PASSWORD))
    body = {"current": PASSWORD, "new": NEW}
    changed = ada.client.post("/api/auth/password", json=body, headers=bearer(here))
    assert changed.status_code == 204
    for grant in (here, there):
        assert ada.get("/api/me", bearer(grant)).status_code == 401
        reply = ada.sign_in(grant_type="refresh_token", refresh_token=grant["refresh_token"])
        assert reply.status_code == 401
    assert ada.sign_in(grant_type="password", username="ada", password=PASSWORD).status_code == 401
    granted(ada.sign_in(grant_type="password", username="ada", password=NEW))


def test_a_new_password_must_be_hard_to_guess(ada: SmallGateway) -> None:
    grant = granted(ada.sign_in(grant_type="password", username="ada", password=PASSWORD))
    for weak in ("short", "ada ada ada ada", "aaaaaaaaaaaaaaaa"):
        body = {"current": PASSWORD, "new": weak}
        reply = ada.client.post("/api/auth/password", json=body, headers=bearer(grant))
        assert (reply.status_code, reply.json()["field"]) == (422, "password"), weak
    assert ada.get("/api/me", bearer(grant)).status_code == 200


def test_signing_out_ends_one_session(ada: SmallGateway) -> None:
    here = granted(ada.sign_in(grant_type="password", username="ada", password=PASSWORD))
    there = granted(ada.sign_in(grant_type="password", username="ada", password=PASSWORD))
    assert ada.client.post("/api/auth/sign-out", headers=bearer(here)).status_code == 204
    assert ada.get("/api/me", bearer(here)).status_code == 401
    assert ada.get("/api/me", bearer(there)).status_code == 200


def test_tokens_expire(small_gateway: SmallGateway) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    owner = small_gateway.bearer("ada")
    made = small_gateway.client.post(
        "/api/projects/alpha/tokens", json={"name": "ci", "days": 1}, headers=owner
    ).json()
    program = {"Authorization": f"Bearer {made['token']}"}
    assert small_gateway.get("/api/me", program).status_code == 200
    small_gateway.clock.pass_time(days=1, seconds=1)
    assert small_gateway.get("/api/me", program).status_code == 401
    small_gateway.clock.pass_time(days=29)
    assert small_gateway.get("/api/me", owner).status_code == 401


def test_passwords_cannot_be_tried_for_long(small_gateway: SmallGateway) -> None:
    replies = [
        small_gateway.sign_in(grant_type="password", username="eve", password=str(n))
        for n in range(MOST_OF_BOTH + 2)
    ]
    codes = [reply.status_code for reply in replies]
    assert codes == [401] * MOST_OF_BOTH + [429] * 2
    assert 0 < int(replies[-1].headers["retry-after"]) <= 900
    small_gateway.clock.pass_time(minutes=16)
    assert small_gateway.sign_in(grant_type="password", username="eve", password="x").status_code == 401


def test_attempts_that_a_clock_ahead_has_counted_lock_nobody_out(ada: SmallGateway) -> None:
    def codes() -> list[int]:
        said = {"grant_type": "password", "username": "ada"}
        return [ada.sign_in(**said, password="x").status_code for _ in range(MOST_OF_BOTH + 1)]

    ada.clock.pass_time(days=1)
    assert codes()[-1] == 429
    ada.clock.pass_time(days=-1)
    assert ada.sign_in(grant_type="password", username="ada", password=PASSWORD).status_code == 200
    assert codes()[-1] == 429
    ada.clock.pass_time(seconds=-5)  # as of another gateway
    assert codes() == [429] * (MOST_OF_BOTH + 1)


def test_attempts_from_one_network_of_ipv6_count_together(ada: SmallGateway) -> None:
    def code(address: str, name: str) -> int:
        client = TestClient(ada.client.app, base_url=ADDRESS, client=(address, 1))
        said = {"grant_type": "password", "username": name, "password": "x"}
        return client.post("/api/auth/token", data=said).status_code

    codes = [code(f"2001:db8:0:1:{n:x}::1", f"name-{n}") for n in range(MOST_OF_ADDRESS + 1)]
    assert codes == [401] * MOST_OF_ADDRESS + [429]
    assert code("2001:db8:0:2::1", "name") == 401


def test_many_people_may_sign_in_from_one_address(ada: SmallGateway) -> None:
    for _ in range(MOST_OF_ADDRESS + 5):
        assert ada.sign_in(grant_type="password", username="ada", password=PASSWORD).status_code == 200
    codes = list[int]()
    for n in range(MOST_OF_ADDRESS + 2):
        codes.append(ada.sign_in(grant_type="password", username=f"name-{n}", password="x").status_code)
        ada.sign_in(grant_type="password", username="ada", password=PASSWORD)
    assert codes == [401] * MOST_OF_ADDRESS + [429] * 2


def test_invented_names_fill_no_table(small_gateway: SmallGateway) -> None:
    codes = [
        small_gateway.sign_in(grant_type="password", username=f"name-{n}", password="x").status_code
        for n in range(2 * MOST_OF_ADDRESS)
    ]
    assert codes == [401] * MOST_OF_ADDRESS + [429] * MOST_OF_ADDRESS
    count = select(func.count()).select_from(AttemptRow)
    rows = small_gateway.accounts.look(lambda session: session.scalar(count))
    assert rows == 1 + 2 * MOST_OF_ADDRESS


def test_a_program_signs_in_by_its_token_in_three_ways(small_gateway: SmallGateway) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    owner = small_gateway.bearer("ada")
    made = small_gateway.client.post(
        "/api/projects/alpha/tokens", json={"name": "ci", "role": "viewer"}, headers=owner
    ).json()
    basic = base64.b64encode(f"anything:{made['token']}".encode()).decode()
    access = granted(small_gateway.sign_in(grant_type="client_credentials", client_secret=made["token"]))
    assert "refresh_token" not in access
    ways = [
        {"Authorization": f"Bearer {made['token']}"},
        {"Authorization": f"Basic {basic}"},
        bearer(access),
    ]
    for way in ways:
        reply = small_gateway.get("/api/me", way).json()
        assert reply["projects"] == [{"project": "alpha", "role": "viewer"}]
    gone = small_gateway.client.delete(f"/api/projects/alpha/tokens/{made['id']}", headers=owner)
    assert gone.status_code == 204
    assert [small_gateway.get("/api/me", way).status_code for way in ways] == [401, 401, 401]


def test_basic_does_not_accept_a_persons_password(ada: SmallGateway) -> None:
    basic = base64.b64encode(f"ada:{PASSWORD}".encode()).decode()
    assert ada.get("/api/me", {"Authorization": f"Basic {basic}"}).status_code == 401


def test_an_invitation_admits_one_person_once(small_gateway: SmallGateway) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    owner = small_gateway.bearer("ada")

    def invited() -> str:
        body = {"role": "viewer", "days": 1}
        reply = small_gateway.client.post("/api/projects/alpha/invitations", json=body, headers=owner)
        return str(reply.json()["invitation"])

    def sign_up(invitation: str, name: str) -> Any:
        body = {"invitation": invitation, "name": name, "password": PASSWORD}
        return small_gateway.client.post("/api/auth/sign-up", json=body)

    first, late = invited(), invited()
    assert sign_up(first, "bob").json() == {"project": "alpha"}
    small_gateway.clock.pass_time(days=2)
    refused = [sign_up(first, "carol"), sign_up(late, "carol"), sign_up("psi_" + "x" * 43, "carol")]
    assert [reply.status_code for reply in refused] == [422] * 3
    assert len({reply.text for reply in refused}) == 1
    grant = granted(small_gateway.sign_in(grant_type="password", username="bob", password=PASSWORD))
    assert small_gateway.get("/api/projects/alpha", bearer(grant)).json()["role"] == "viewer"
    assert (
        small_gateway.sign_in(grant_type="password", username="carol", password=PASSWORD).status_code == 401
    )


def test_an_invitation_lowers_no_role(small_gateway: SmallGateway) -> None:
    for name, role in (("ada", Role.OWNER), ("bob", Role.OWNER), ("eve", Role.VIEWER)):
        small_gateway.person(name, "alpha", role)
    ada, bob, eve = map(small_gateway.bearer, ("ada", "bob", "eve"))
    body = {"role": "editor"}
    invited = small_gateway.client.post("/api/projects/alpha/invitations", json=body, headers=ada).json()
    token = small_gateway.client.post("/api/projects/alpha/tokens", json={"name": "t"}, headers=bob).json()
    invitation = {"invitation": invited["invitation"]}
    refused = small_gateway.client.post("/api/auth/join", json=invitation, headers=bob)
    assert (refused.status_code, "owner of alpha already" in refused.json()["detail"]) == (409, True)
    assert small_gateway.get("/api/projects/alpha", bob).json()["role"] == "owner"
    program = {"Authorization": f"Bearer {token['token']}"}
    assert small_gateway.get("/api/projects/alpha", program).status_code == 200
    assert small_gateway.client.post("/api/auth/join", json=invitation, headers=eve).status_code == 200
    assert small_gateway.get("/api/projects/alpha", eve).json()["role"] == "editor"


def test_the_last_owner_stays(small_gateway: SmallGateway) -> None:
    ada = small_gateway.person("ada", "alpha", Role.OWNER)
    owner = small_gateway.bearer("ada")
    path = f"/api/projects/alpha/members/{ada}"
    assert small_gateway.client.delete(path, headers=owner).status_code == 409
    assert small_gateway.client.put(path, json={"role": "viewer"}, headers=owner).status_code == 409
    small_gateway.person("bob", "alpha", Role.OWNER)
    assert small_gateway.client.delete(path, headers=owner).status_code == 204
    assert small_gateway.get("/api/projects/alpha", owner).status_code == 404


def test_the_audit_says_who_did_what(small_gateway: SmallGateway) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    owner = small_gateway.bearer("ada")
    made = small_gateway.client.post("/api/projects/alpha/tokens", json={"name": "ci"}, headers=owner).json()
    reply = small_gateway.get("/api/projects/alpha/audit", owner)
    entries = reply.json()["entries"]
    assert [one["action"] for one in entries] == ["token added", "member set", "project added"]
    assert entries[0]["by"] == f"user/{small_gateway.people['ada']}"
    assert entries[0]["subject"] == f"token/{made['id']}"
    assert made["token"] not in reply.text


# ---- Signing in at a provider of identities: who gets in, and what is refused with nothing stored.


BACK: Final = "/api/auth/oidc/callback"
OTHER: Final = "https://other.example"


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    """A provider of its own for each test."""
    with identity_provider() as made:
        yield made


@pytest.fixture
def gateway(database_url: str, tmp_path: Path, provider: IdentityProvider) -> SmallGateway:
    """One that trusts it, with a project that people of example.com may look at."""
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    settings = ProviderSettings(
        issuer=provider.issuer,
        client_id="penstock",
        client_secret="of the client",
        gateway=ADDRESS,
        title="Example",
        domains={"example.com": Newcomers(project="alpha", role=Role.VIEWER)},
    )
    made = SmallGateway.at(database_url, registry, tmp_path, oidc=settings)
    made.person("owner", "alpha", Role.OWNER)
    return made


def sent_back(gateway: SmallGateway, who: str, **body: str) -> str:
    """Where the provider sends a browser that has signed in there as somebody."""
    begun = gateway.client.post("/api/auth/oidc", json=body)
    assert begun.status_code == 200, begun.text
    reply = httpx2.post(begun.json()["address"], data={"sub": who}, follow_redirects=False)
    assert reply.status_code == 302, reply.text
    place = urlsplit(reply.headers["Location"])
    assert f"{place.scheme}://{place.netloc}{place.path}" == f"{ADDRESS}{BACK}"
    return f"{place.path}?{place.query}"


def arrived(gateway: SmallGateway, place: str) -> str:
    """Where the gateway leads the browser that comes back."""
    reply = gateway.client.get(place, follow_redirects=False)
    assert reply.status_code == 303, reply.text
    return str(reply.headers["Location"])


def me(gateway: SmallGateway) -> dict[str, Any]:
    """Who the page is, that has taken its tokens."""
    tokens = gateway.client.post("/api/auth/oidc/session")
    assert tokens.status_code == 200, tokens.text
    header = {"Authorization": f"Bearer {tokens.json()['access_token']}"}
    return dict(gateway.get("/api/me", header).json())


def nothing_stored(gateway: SmallGateway) -> bool:
    """Whether no sign-in was recorded."""
    return not {"identity added", "signed in"} & set(gateway.actions())


def test_a_person_of_the_domain_signs_in_and_is_the_same_the_next_time(
    gateway: SmallGateway, provider: IdentityProvider
) -> None:
    begun = gateway.client.post("/api/auth/oidc", json={})
    cookie = begun.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    asked = {name: one[0] for name, one in parse_qs(urlsplit(begun.json()["address"]).query).items()}
    assert asked["redirect_uri"] == f"{ADDRESS}{BACK}"
    reply = httpx2.post(begun.json()["address"], data={"sub": "alice"}, follow_redirects=False)
    back = gateway.client.get(reply.headers["Location"], follow_redirects=False)
    assert back.headers["Location"] == "/#/arrived"
    strict = [one.lower() for one in back.headers.get_list("set-cookie") if "penstock-session" in one]
    assert "samesite=strict" in strict[0]
    assert "httponly" in strict[0]
    (exchanged,) = provider.exchanged
    challenge = urlsafe_b64encode(sha256(exchanged["code_verifier"].encode()).digest()).rstrip(b"=").decode()
    assert (asked["code_challenge"], asked["code_challenge_method"]) == (challenge, "S256")
    first = me(gateway)
    assert (first["name"], first["projects"]) == ("alice", [{"project": "alpha", "role": "viewer"}])
    assert gateway.client.post("/api/auth/oidc/session").status_code == 401, "once"
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/arrived"
    assert me(gateway) == first
    assert gateway.actions().count("identity added") == 1


def test_an_address_alone_makes_no_owner_of_an_account(gateway: SmallGateway) -> None:
    gateway.person("alice", "alpha", Role.OWNER)
    assert arrived(gateway, sent_back(gateway, "mallory")) == "/#/not-invited"
    assert nothing_stored(gateway)
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/arrived"
    found = me(gateway)
    assert found["name"].startswith("alice-")
    assert found["subject"] != f"user/{gateway.people['alice']}"
    assert found["projects"] == [{"project": "alpha", "role": "viewer"}]


def test_a_new_person_needs_an_invitation(gateway: SmallGateway) -> None:
    owner = gateway.bearer("owner")
    made = gateway.client.post("/api/projects/alpha/invitations", json={"role": "editor"}, headers=owner)
    secret = made.json()["invitation"]
    assert arrived(gateway, sent_back(gateway, "bob")) == "/#/not-invited"
    assert arrived(gateway, sent_back(gateway, "bob", invitation=secret)) == "/#/arrived"
    assert me(gateway)["projects"] == [{"project": "alpha", "role": "editor"}]
    assert arrived(gateway, sent_back(gateway, "carol", invitation=secret)) == "/#/not-invited"
    assert arrived(gateway, sent_back(gateway, "bob")) == "/#/arrived", "known by now"


def test_a_disabled_person_cannot_sign_in(gateway: SmallGateway) -> None:
    from penstock.gateway.accounts import users
    from penstock.gateway.store.tables import UserRow

    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/arrived"
    id_ = me(gateway)["subject"].partition("/")[2]
    gateway.accounts.run(
        lambda session, now: users.disable(session, now, session.get(UserRow, id_), by="test")  # type: ignore[arg-type]
    )
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/not-invited"
    assert gateway.client.post("/api/auth/oidc/session").status_code == 401


def test_a_sign_in_that_another_browser_began_is_refused(gateway: SmallGateway) -> None:
    place = sent_back(gateway, "alice")
    query = parse_qs(urlsplit(place).query)
    wrong = [
        f"{BACK}?code={query['code'][0]}&state=guess",
        f"{BACK}?code={query['code'][0]}",
        f"{BACK}?state={query['state'][0]}",
        f"{BACK}?error=access_denied&state={query['state'][0]}",
        f"{place}&iss=https://evil.example",
    ]
    for one in wrong:
        assert arrived(gateway, one) == "/#/not-signed-in", one
    assert arrived(gateway, place) == "/#/not-signed-in", "the cookie went with the first answer"
    place = sent_back(gateway, "alice")
    cookies = dict(gateway.client.cookies)
    gateway.client.cookies.clear()
    assert arrived(gateway, place) == "/#/not-signed-in"
    access = gateway.bearer("owner")["Authorization"].removeprefix("Bearer ")
    for cookie in ("", "x", access):
        reply = gateway.client.get(
            place, headers={"Cookie": f"penstock-departure={cookie}"}, follow_redirects=False
        )
        assert reply.headers["Location"] == "/#/not-signed-in"
    header = {"Cookie": f"penstock-departure={cookies['penstock-departure']}"}
    gateway.clock.pass_time(minutes=11)
    reply = gateway.client.get(place, headers=header, follow_redirects=False)
    assert reply.headers["Location"] == "/#/not-signed-in"
    assert "identity added" not in gateway.actions()


FORGED: Final[dict[str, Forge]] = {
    "audience": lambda claims: (claims | {"aud": "somebody else"}, "RS256"),
    "audiences": lambda claims: (claims | {"aud": ["penstock", "other"], "azp": "other"}, "RS256"),
    "issuer": lambda claims: (claims | {"iss": OTHER}, "RS256"),
    "nonce": lambda claims: (claims | {"nonce": "of another sign-in"}, "RS256"),
    "no nonce": lambda claims: ({name: one for name, one in claims.items() if name != "nonce"}, "RS256"),
    "expired": lambda claims: (claims | {"exp": claims["iat"] - 3600}, "RS256"),
    "no subject": lambda claims: (claims | {"sub": ""}, "RS256"),
    "alg none": lambda claims: (claims, "none"),
    "shared secret": lambda claims: (claims, "HS256"),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_a_wrong_token_admits_nobody(gateway: SmallGateway, provider: IdentityProvider, forge: Forge) -> None:
    provider.forge = forge
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/not-signed-in"
    assert nothing_stored(gateway)
    provider.forge = lambda claims: (claims, "RS256")
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/arrived"


def test_a_failing_provider_is_reported_and_codes_cannot_be_guessed(
    gateway: SmallGateway, provider: IdentityProvider
) -> None:
    place = sent_back(gateway, "alice")
    provider.fails = True
    assert arrived(gateway, place) == "/#/not-signed-in"
    provider.fails = False
    for _ in range(10):
        state = parse_qs(urlsplit(sent_back(gateway, "alice")).query)["state"][0]
        assert arrived(gateway, f"{BACK}?code=guess&state={state}") == "/#/not-signed-in"
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/not-signed-in"
    gateway.clock.pass_time(minutes=16)
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/arrived"


def test_without_a_provider_there_is_no_sign_in_by_one(database_url: str, tmp_path: Path) -> None:
    made = SmallGateway.at(database_url, f"sqlite:///{tmp_path}/registry.sqlite", tmp_path)
    assert made.client.get("/api/auth/oidc").json() == {"title": None}
    assert made.client.post("/api/auth/oidc", json={}).status_code == 404
    assert made.client.get(BACK).status_code == 404
    assert made.client.post("/api/auth/oidc/session").status_code == 404
