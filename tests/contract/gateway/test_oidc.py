"""Signing in at a provider of identities: who gets in, and what is refused with nothing stored."""

from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("oidc_provider_mock", reason="a provider for tests, of the extra test-people")

import httpx2

from penstock.gateway.accounts.oidc import Newcomers, ProviderSettings
from penstock.gateway.store.tables import Role
from tests.support.gateway.identity_provider import Forge, IdentityProvider, identity_provider
from tests.support.gateway.small_gateway import ADDRESS, SmallGateway

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
        client_secret="of the client",  # noqa: S106 - no real client's
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


def test_a_newcomer_brings_an_invitation(gateway: SmallGateway) -> None:
    owner = gateway.bearer("owner")
    made = gateway.client.post("/api/projects/alpha/invitations", json={"role": "editor"}, headers=owner)
    secret = made.json()["invitation"]
    assert arrived(gateway, sent_back(gateway, "bob")) == "/#/not-invited"
    assert arrived(gateway, sent_back(gateway, "bob", invitation=secret)) == "/#/arrived"
    assert me(gateway)["projects"] == [{"project": "alpha", "role": "editor"}]
    assert arrived(gateway, sent_back(gateway, "carol", invitation=secret)) == "/#/not-invited"
    assert arrived(gateway, sent_back(gateway, "bob")) == "/#/arrived", "known by now"


def test_who_is_disabled_stays_out(gateway: SmallGateway) -> None:
    from penstock.gateway.accounts import users
    from penstock.gateway.store.tables import UserRow

    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/arrived"
    id_ = me(gateway)["subject"].partition("/")[2]
    gateway.accounts.run(
        lambda session, now: users.disable(session, now, session.get(UserRow, id_), by="test")  # type: ignore[arg-type]
    )
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/not-invited"
    assert gateway.client.post("/api/auth/oidc/session").status_code == 401


def test_what_was_not_begun_in_this_browser_is_refused(gateway: SmallGateway) -> None:
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
def test_a_token_that_is_wrong_lets_no_person_in(
    gateway: SmallGateway, provider: IdentityProvider, forge: Forge
) -> None:
    provider.forge = forge
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/not-signed-in"
    assert nothing_stored(gateway)
    provider.forge = lambda claims: (claims, "RS256")
    assert arrived(gateway, sent_back(gateway, "alice")) == "/#/arrived"


def test_a_provider_that_fails_is_said_and_codes_cannot_be_tried_for_long(
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


def test_without_a_provider_there_is_none(database_url: str, tmp_path: Path) -> None:
    made = SmallGateway.at(database_url, f"sqlite:///{tmp_path}/registry.sqlite", tmp_path)
    assert made.client.get("/api/auth/oidc").json() == {"title": None}
    assert made.client.post("/api/auth/oidc", json={}).status_code == 404
    assert made.client.get(BACK).status_code == 404
    assert made.client.post("/api/auth/oidc/session").status_code == 404
